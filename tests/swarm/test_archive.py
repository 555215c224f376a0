"""The archive: what is kept, that damage is found, and a swarm that goes on from it alone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from archived import MANIFEST, SIGNED, SLOW, archived, entry, open_archive, trained
from clocks import on_virtual_clock
from swarm import OWNER, Swarm, sign, tiny_manifest

from peers.config.errors import ConfigError
from peers.config.peer_file import load
from peers.config.run_file import published_text
from peers.lab.world.virtual_time import run
from peers.network.orders.order_book import OrderBook
from peers.stageless.archivist.archivist import Policy
from peers.state import checkpoint_file
from peers.state.archive import INDEX, MODERATED_ORDER, Archive, entry_name, kept
from peers.state.archive_restore import signers
from peers.state.archive_store import ArchiveError, open_store, sha256
from peers.tools.owner.run_facts import from_archive
from peers.tools.owner.training_report import summary
from protocols.signed.identity import Identity
from protocols.signed.moderation import add_signature, begin_moderation
from protocols.signed.orders import seal_order
from swarmnet.identifiers import PeerId
from swarmnet.rounds.own_contributions import NOTHING_PAST, RestartState
from swarmnet.run.owner_orders import Ban, OwnerOrders
from swarmnet.run.schema import Moderators


@pytest.fixture(params=["folder", "file", "memory"])
def place(request, tmp_path):
    return {
        "folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": f"memory://{tmp_path.name}/a",
    }[request.param]  # fmt: skip


# -- retention ----------------------------------------------------------------------------------------


def test_the_newest_stay_and_each_so_many_th_of_the_older_ones():
    rounds = [3, 7, 11, 15, 19, 23, 27]
    assert kept(rounds, 4, 2, 0) == {23, 27}
    assert kept(rounds, 4, 2, 2) == {7, 15, 23, 27}
    assert kept(rounds, 4, 1, 1) == set(rounds)
    assert kept([], 4, 3, 2) == set()


# -- the store ----------------------------------------------------------------------------------------


def test_an_archive_comes_back_as_it_was_put(place):
    archive = Archive(open_store(place))
    assert archive.open(SIGNED) == SIGNED
    for number in (3, 7, 11):
        archive.put(entry(0, number, b"weights %d" % number), b"weights %d" % number)
    archive.put_contributors([{"peer": "p", "name": "n", "tokens": {"0": 5}}])
    again = Archive(open_store(place))
    assert again.open() == SIGNED
    assert [one.round for one in again.newest(0)] == [11, 7, 3]
    assert again.checkpoint(again.newest(0)[0]) == b"weights 11"
    assert again.contributors()[0]["tokens"] == {"0": 5}
    gone = again.prune(4, 1, 2)
    assert [one.round for one in gone] == [3]
    assert open_store(place).read(entry_name(0, 3)) is None
    assert Archive(open_store(place)).open() == SIGNED


def test_damage_is_found_and_named(place):
    archive = Archive(open_store(place))
    archive.open(SIGNED)
    archive.put(entry(0, 3, b"weights"), b"weights")
    assert archive.damaged() == []
    archive.store.write(entry_name(0, 3), b"weightz")
    assert archive.damaged() == [entry_name(0, 3)]
    with pytest.raises(ArchiveError, match="damaged"):
        archive.checkpoint(archive.entries[0])
    archive.store.delete(entry_name(0, 3))
    with pytest.raises(ArchiveError, match="missing"):
        archive.checkpoint(archive.entries[0])


@pytest.mark.parametrize(
    "index",
    [
        b"{", b"[]", b'{"format": 2}', b'{"format": 1, "checkpoints": [{}]}', b"[" * 5000,
        json.dumps({"format": 1, "checkpoints": [
            {"name": "../x", "stage": 0, "round": 1, "bytes": 1, "sha256": "", "signers": [], "archived": 1}
        ]}).encode(),
        *(json.dumps({"format": 1, "checkpoints": [
            {"name": entry_name(0, 1), "stage": 0, "round": 1, "bytes": 1, "sha256": "", "signers": [],
             "archived": 1, **wrong}
        ]}).encode() for wrong in ({"bytes": "many"}, {"bytes": -1}, {"archived": 10**400},
                                   {"archived": float("nan")})),
    ],
)  # fmt: skip
def test_a_strangers_index_is_refused_in_one_line(tmp_path, index):
    archive = Archive(open_store(str(tmp_path)))
    archive.open(SIGNED)
    archive.store.write(INDEX, index)
    with pytest.raises(ArchiveError, match="cannot be used"):
        Archive(open_store(str(tmp_path))).open()


def test_another_runs_archive_is_not_written_to(tmp_path):
    Archive(open_store(str(tmp_path))).open(SIGNED)
    with pytest.raises(ArchiveError, match="is the archive of the run"):
        Archive(open_store(str(tmp_path))).open(sign(tiny_manifest((2, 1), seed=9)))
    with pytest.raises(ArchiveError, match="is no archive"):
        Archive(open_store(str(tmp_path / "elsewhere"))).open()
    with pytest.raises(ArchiveError, match="cannot be opened"):
        open_store("nonsense://x")


def test_an_archivist_needs_a_place_and_a_run(tmp_path):
    published = tmp_path / "run.json"
    published.write_text(published_text(SIGNED))
    file = tmp_path / "archivist.yaml"
    file.write_text("role: archivist\nrun: run.json\n")
    with pytest.raises(ConfigError, match="archive: is missing"):
        load(file)
    file.write_text("role: archivist\nrun: run.json\narchive: here\narchiving: {seconds: 5min, newest: 2}\n")
    config = load(file)
    assert config.archive == str(tmp_path / "here")
    assert (config.archiving.seconds, config.archiving.newest) == (300.0, 2)
    file.write_text("role: archivist\narchive: s3://bucket/run\n")
    with pytest.raises(ConfigError, match="run: is missing"):
        load(file)


# -- an archivist and a swarm -------------------------------------------------------------------------


def test_a_swarm_whose_peers_are_all_gone_goes_on_from_the_archive_alone(tmp_path):
    place, ordered = str(tmp_path / "archive"), OwnerOrders(sequence=5, reason="look")

    async def before():
        swarm = Swarm(MANIFEST, seed=1)
        await trained(swarm, {"a": 0, "b": 0, "c": 1, "d": 1}, 5)
        swarm.members["a"].worker.orders.book.take(seal_order(OWNER, SIGNED.run_id, ordered).data)
        archivist, archive, said = await archived(swarm, place, Policy(newest=2))
        await archivist.once()
        first = {stage: archive.newest(stage)[0].round for stage in (0, 1)}
        settled = max(s for _, s in swarm.rounds().values())
        await swarm.until(lambda: min(s for _, s in swarm.rounds().values()) > settled + 5, 60.0)
        await archivist.once()
        assert not [text for text in said if "not archived" in text]
        for stage in (0, 1):
            entries = archive.newest(stage)
            assert entries[0].round > first[stage] >= 3
            assert len(entries[0].signers) == 2
        assert archive.damaged() == []
        held = archivist.book.held
        assert held is not None
        assert held.order == ordered
        digests = {stage: swarm.digests(stage) for stage in (0, 1)}
        archivist.circle.close()
        for name in swarm.living():
            await swarm.crash(name)
        return {stage: archive.newest(stage)[0].round for stage in (0, 1)}, digests

    at, digests = run(before())
    for stage in (0, 1):
        held = checkpoint_file.read(tmp_path / "archive" / entry_name(stage, at[stage]))
        assert held.digest in {found[at[stage]] for found in digests[stage].values() if at[stage] in found}
        assert len(signers(held)) == 2

    async def after():
        swarm = Swarm(MANIFEST, seed=2)
        swarm.open()
        for name, stage in (("e", 0), ("f", 0), ("g", 1), ("h", 1)):
            swarm.start(name, stage, checkpoints=tmp_path / name, archive=place)
        await swarm.until(lambda: len(swarm.rounds()) == 4, 20.0)
        await swarm.until(
            lambda: all(swarm.rounds()[n][1] > at[stage] + 4 for n, stage in (("e", 0), ("f", 0), ("g", 1))),
            60.0,
        )
        for stage in (0, 1):
            firsts = [min(found) for found in swarm.digests(stage).values() if found]
            assert min(firsts) > at[stage], "nobody began again from the seed"
        await swarm.close()

    run(after())

    facts = from_archive(open_archive(place), SIGNED, 0.0)
    told = summary(facts)
    assert {source["name"] for source in told["sources"]} == {s.name for s in MANIFEST.data.sources}
    assert facts.order == ordered
    assert told["compute"]["settled_rounds"] == at[0] + 1
    assert [one["signed"] for one in told["contributors"]] == [2, 2, 2, 2]


def test_bans_by_moderators_come_back_from_the_archive_as_orders_of_the_owner_do(tmp_path):
    keys = [Identity.from_seed(bytes([number]) * 32) for number in (21, 22, 23)]
    moderators = Moderators(tuple(key.peer_id for key in keys), 2)
    place, banned = str(tmp_path / "archive"), {"noise", "spam"}

    def bans(signed, *, peer):
        order = OwnerOrders(7, "noise", bans=(Ban(PeerId(peer), "noise"),))
        return add_signature(
            keys[1], signed.run_id, begin_moderation(keys[0], signed.run_id, moderators, order)
        )

    def reasons(order):
        return {ban.reason for ban in order.bans}

    async def story():
        swarm = Swarm(tiny_manifest((2, 1), moderators=moderators), seed=1)
        swarm.open()
        signed = swarm.signed
        archivist, _, _ = await archived(swarm, place, Policy())
        by_owner = OwnerOrders(5, "spam", bans=(Ban(PeerId("12D3KooWother"), "spam"),))
        archivist.book.take(seal_order(OWNER, signed.run_id, by_owner).data)
        archivist.book.take(bans(signed, peer="12D3KooWliar").data)
        await archivist.write_facts()
        archivist.circle.close()
        assert reasons(from_archive(open_archive(place), signed, 0.0).order) == banned
        swarm.start("e", 0, checkpoints=tmp_path / "e", archive=place)
        await swarm.until(lambda: "e" in swarm.rounds(), 60.0)
        assert reasons(swarm.members["e"].worker.orders.book.order) == banned
        await swarm.close()
        again = Swarm(signed.manifest, seed=2)
        archivist, archive, _ = await archived(again, place, Policy())
        assert reasons(archivist.book.order) == banned
        archive.store.write(MODERATED_ORDER, bans(SIGNED, peer="12D3KooWliar").data)
        told: list[str] = []
        book = OrderBook(
            signed=signed, kept=None, log_event=lambda *_: None, notify=lambda *say: told.extend(say)
        )
        book.take_archived(archive.orders(), place)
        assert reasons(book.order) == {"spam"}
        assert told[0] == "order_unusable"
        assert told[1].startswith(f"{place}: an order in it is refused: ")
        with pytest.raises(ArchiveError, match="its order is refused"):
            from_archive(open_archive(place), signed, 0.0)
        archivist.circle.close()
        await again.close()

    run(story())


def test_a_stage_whose_peers_are_all_gone_comes_back_from_the_archivist_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.stageless.archivist.serve.IDLE_SECONDS", 5.0)
    swarm = Swarm(MANIFEST, seed=1)

    async def story():
        await trained(swarm, {"a": 0, "b": 0, "c": 1, "d": 1}, 5, compute=SLOW)
        archivist, archive, _ = await archived(swarm, str(tmp_path / "archive"), Policy(seconds=0.5))
        archiving = asyncio.create_task(archivist.run())  # It asks whoever comes for weights, at any time.
        await swarm.until(lambda: archive.newest(1), 60.0)
        for name in ("c", "d"):
            await swarm.crash(name)
        await swarm.during(10.0)
        at = archive.newest(1)[0].round
        for name in ("e", "f"):
            swarm.start(name, 1, compute=SLOW)
        await swarm.until(lambda: {"e", "f"} <= swarm.rounds().keys(), 60.0)
        await swarm.until(lambda: min(swarm.rounds()[name][1] for name in "ef") > at + 4, 60.0)
        served = archivist.circle.serving.served_bytes
        assert list(served) == [1]
        assert served[1] >= archivist._layouts[1].size * 4
        fetched = swarm.of("fetched", "e", "f")
        assert {note.fields["round"] for note in fetched} == {at}, "and nobody began at the seed"
        for name in "ef":
            assert min(swarm.digests(1)[name]) > at
            size = swarm.members[name].worker.services.links.membership.group_size()
            assert size == 2, "the archivist is none of them"
        await swarm.during(8.0)
        assert archivist.circle.states[1][1].snapshots.held == (), "nothing in memory for nobody"
        await swarm.until(lambda: archive.newest(1)[0].round > at, 60.0)
        archiving.cancel()
        archivist.circle.close()
        await swarm.close()

    run(story())
    mine, theirs = (swarm.digests(1)[name] for name in "ef")
    shared = mine.keys() & theirs.keys()
    assert len(shared) > 4
    assert all(mine[round] == theirs[round] for round in shared)


@on_virtual_clock
async def test_what_nobody_else_has_signed_is_not_taken_from_an_archivist(tmp_path):
    swarm = Swarm(MANIFEST, seed=1)
    await trained(swarm, {"a": 0, "c": 1}, 4, compute=SLOW)
    archivist, archive, _ = await archived(swarm, str(tmp_path / "archive"), Policy())
    await archivist.once()
    (held,) = archive.newest(1)
    found = checkpoint_file.read(tmp_path / "archive" / held.name)
    layout = archivist._layouts[1]
    units = found.units(layout)
    units[0] += 1
    forged = checkpoint_file.content(MANIFEST, 1, held.round, found.chain, units, layout, found.signed)
    archive.put(replace(held, bytes=len(forged), sha256=sha256(forged)), forged)
    await swarm.crash("c")
    await swarm.during(10.0)
    swarm.start("e", 1, compute=SLOW)
    await swarm.until(lambda: "e" in swarm.rounds(), 90.0)
    assert not swarm.of("fetched", "e")
    archivist.circle.close()
    await swarm.close()


@pytest.mark.parametrize(("added", "past", "reason"), [
    (1, NOTHING_PAST, "no peer has signed its weights"), (0, RestartState({0: ()}), "names settled sets"),
])  # fmt: skip
@on_virtual_clock
async def test_an_archive_that_somebody_has_changed_starts_nobody(tmp_path, added, past, reason):
    place = tmp_path / "archive"
    swarm = Swarm(MANIFEST, seed=1)
    await trained(swarm, {"a": 0, "c": 1}, 4)
    archivist, archive, _ = await archived(swarm, str(place), Policy())
    await archivist.once()
    archivist.circle.close()
    (held,) = archive.newest(0)
    # Somebody changes a file and writes the index anew: it is whole, but nobody has signed that.
    found = checkpoint_file.read(place / held.name)
    layout = archivist._layouts[0]
    units = found.units(layout)
    units[0] += added
    forged = checkpoint_file.content(
        MANIFEST, 0, held.round, found.chain, units, layout, found.signed, past
    )  # fmt: skip
    archive.put(replace(held, bytes=len(forged), sha256=sha256(forged)), forged)
    for name in swarm.living():
        await swarm.crash(name)
    fresh = Swarm(MANIFEST, seed=2)
    fresh.open()
    late = fresh.start("e", 0, checkpoints=tmp_path / "e", archive=str(place))
    with pytest.raises(ArchiveError, match=reason):
        await late.task
    assert not list((tmp_path / "e").glob("*"))
