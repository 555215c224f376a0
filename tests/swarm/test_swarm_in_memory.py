"""Six workers in three stages, in memory, on a virtual clock, with real compute: what holds of a swarm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import swarm as fixture
from clocks import on_virtual_clock
from swarm import Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.config.run_file import RunFileError, from_wire
from peers.lab.world.virtual_time import run
from peers.state import checkpoint_file
from peers.state.archive_restore import Restoring
from peers.state.archive_store import StoreUnreachable
from peers.worker.rounds import update_compute
from protocols.messages.table import GetManifest, Hello, ManifestResponse, Refuse
from swarmnet.identifiers import PeerId
from swarmnet.run.schema import WIRE_VERSION

SIX = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2}
FETCH_ROUNDS = 20
"""Settled rounds after which a newcomer must fetch a snapshot: the sets of the last 16 are kept."""


def play(swarm: Swarm, story: Callable[[Swarm], Awaitable[None]]) -> Swarm:
    """Six peers, the story, and a polite end; what holds of every story is checked."""

    async def whole() -> None:
        swarm.open()
        for name, stage in SIX.items():
            swarm.start(name, stage, in_flight=2)
        await story(swarm)
        await swarm.close()

    run(whole())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 0
    return swarm


def settled(swarm: Swarm, *names: str) -> int:
    """The oldest of the newest settled rounds of these peers (of all that live)."""
    rounds = swarm.rounds()
    return min(rounds[name][1] if name in rounds else -1 for name in names or swarm.living())


def contributes(swarm: Swarm, name: str, since: float = 0.0) -> bool:
    contributor = swarm.members[name].peer
    return any(
        note.fields["contributor"] == contributor and note.time >= since
        for note in swarm.of("contribution_accepted")
    )


def test_the_loss_falls_and_the_digests_of_all_shared_rounds_are_equal():
    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: swarm.committed(0) >= 250, 60.0)

    swarm = play(Swarm(tiny_manifest()), story)
    losses = swarm.losses(0)
    assert sum(losses[:20]) / 20 > 5.3
    assert sum(losses[-20:]) / 20 < 4.8
    assert shared_rounds(swarm) >= 3 * 20
    for name in SIX:
        assert swarm.members[name].worker.services.pipeline_service.ledger.committed > 50, "all take part"
        assert contributes(swarm, name)
    drops = sum(
        sum(member.worker.services.pipeline_service.ledger.dropped.values())
        for member in swarm.members.values()
    )
    assert drops <= 4, "only what was under way when everybody left at once"


def test_a_killed_peer_is_missed_for_a_moment_and_a_newcomer_takes_its_place():
    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: settled(swarm) >= FETCH_ROUNDS, 60.0)
        await swarm.crash("c")
        killed_at = swarm.loop.time()
        before = len(swarm.of("committed", "d"))
        await swarm.until(lambda: len(swarm.of("committed", "d")) > before + 2, 3.0)
        newcomer = swarm.start("g")
        await swarm.until(lambda: contributes(swarm, "g"), 15.0)
        assert newcomer.worker.stage == 1, "the stage that lost a peer"
        (fetched,) = swarm.of("fetched", "g")
        assert fetched.fields["round"] >= 3
        assert fetched.fields["bytes"] == newcomer.worker.services.part.layout.size * 4
        assert not swarm.of("resync")
        await swarm.until(lambda: settled(swarm) > FETCH_ROUNDS + 9, 60.0)
        served = [note for note in swarm.of("committed", "g") if note.time > killed_at]
        assert len(served) > 10, "microbatches go through the newcomer"

    swarm = play(Swarm(tiny_manifest()), story)
    assert len(swarm.digests(1)["g"].keys() & swarm.digests(1)["d"].keys()) > 5


def test_a_large_state_is_hashed_when_it_is_signed_and_a_newcomer_takes_it_up(monkeypatch):
    monkeypatch.setattr(update_compute, "HASHED_NUMBERS", 0)
    every, found = tiny_manifest().rounds.snapshot_interval, {}

    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: settled(swarm) >= FETCH_ROUNDS, 60.0)
        swarm.start("g", 1)
        await swarm.until(lambda: contributes(swarm, "g"), 15.0)
        await swarm.until(lambda: settled(swarm, "g") > FETCH_ROUNDS + every, 60.0)

    swarm = play(Swarm(tiny_manifest()), story)
    for name in ("c", "g"):
        told = {note.fields["round"]: note.fields["digest"] for note in swarm.of("settled", name)}
        hashed = {round: digest for round, digest in told.items() if digest}
        assert hashed.keys() == {round for round in told if (round + 1) % every == 0}
        found |= {(round, name): digest for round, digest in hashed.items()}
    shared = [round for round, name in found if name == "g"]
    assert shared
    assert all(found[round, "c"] == found[round, "g"] for round in shared)


def test_a_polite_leave_finishes_what_it_started_and_hands_over_the_last_contribution():
    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: settled(swarm) >= 3, 60.0)
        left_at = swarm.loop.time()
        await swarm.leave("c")
        assert swarm.loop.time() - left_at < 3.0
        ledger = swarm.members["c"].worker.services.pipeline_service.ledger
        assert not ledger.dropped
        last = max(note.fields["round"] for note in swarm.of("contribution_made", "c"))
        await swarm.until(lambda: settled(swarm, "d") >= last, 20.0)

    swarm = play(Swarm(tiny_manifest(), stub=True), story)
    made = {note.fields["id"] for note in swarm.of("contribution_made", "c")}
    in_sets = {identity for note in swarm.of("settled", "d") for identity in note.fields["ids"]}
    assert made <= in_sets
    tokens = sum(note.fields["tokens"] for note in swarm.of("contribution_made", "c"))
    gathered = sum(note.fields["tokens"] for note in swarm.of("committed", "c"))
    assert tokens == gathered, "nothing gathered is lost"
    reasons = {note.fields["reason"] for note in swarm.of("unlinked", "d", "a", "b", "e", "f")}
    assert "left: leaving" in reasons


@on_virtual_clock
async def test_a_peer_that_waits_for_its_archive_can_leave(tmp_path, monkeypatch):
    def away(*_: object) -> str:
        raise StoreUnreachable("nobody answers")

    monkeypatch.setattr(Restoring, "_copy_newest", away)
    swarm = Swarm(tiny_manifest())
    swarm.open()
    member = swarm.start("a", 0, archive=str(tmp_path / "archive"), checkpoints=tmp_path)
    await swarm.until(lambda: any("trying again" in line for _, line in member.said), 60.0)
    told_at = swarm.loop.time()
    await swarm.close()
    assert swarm.loop.time() - told_at < 1.0


@pytest.mark.parametrize(
    ("missed", "way"),
    [(5, "contributions"), pytest.param(FETCH_ROUNDS + 5, "snapshot", marks=pytest.mark.soak)],
)
def test_a_peer_that_comes_back_with_an_old_checkpoint_goes_on_with_the_group(tmp_path, missed, way):
    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: settled(swarm) >= 3, 60.0)
        worker = swarm.members["d"].worker
        kept = worker.services.round_service.settled_weights()
        saved_round = kept.settled_round
        checkpoint_file.write(
            tmp_path,
            worker.context.manifest,
            1,
            saved_round,
            kept.chain,
            kept.units,
            worker.services.part.layout,
        )
        await swarm.crash("d")
        await swarm.until(lambda: settled(swarm) > saved_round + missed, 60.0)
        old_digests = swarm.digests(1)["d"]
        back = swarm.start("d", 1, checkpoints=tmp_path)
        back_at = swarm.loop.time()
        await swarm.until(lambda: contributes(swarm, "d", back_at), 20.0)
        assert any("restored" in event for event, _ in back.said)
        assert bool(swarm.of("fetched", "d")) == (way == "snapshot")
        later = settled(swarm, "c") + 6
        await swarm.until(lambda: settled(swarm) > later, 20.0)
        new = swarm.digests(1)["d"].keys() - old_digests.keys()
        assert len(new & swarm.digests(1)["c"].keys()) >= 5
        back.worker.services.disk.folder = (
            None  # It would write in a thread, for which a virtual clock cannot wait.
        )

    play(Swarm(tiny_manifest(), stub=True), story)


class Stranger:
    """`Receiver` of a peer of another run that speaks the same wire."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, bytes]] = []

    def received(self, peer: PeerId, lane: str, message: object, body: bytes, wire_bytes: int) -> None:
        self.heard.append((message, body))

    def lost(self, peer: PeerId, lane: str, reason: str) -> None: ...

    def refused(self, peer: PeerId, code: str, reason: str) -> None: ...


def test_peers_of_another_run_are_refused_and_its_manifest_is_not_taken_for_ours():
    other = fixture.sign(tiny_manifest(name="another"))
    stranger = Stranger()

    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: settled(swarm) >= 1, 60.0)
        transport = swarm.network.transport(fixture.OWNER.peer_id)
        transport.listen(stranger)
        target = swarm.members["a"]
        link = await transport.open(target.peer, "group", 5.0)
        link.post(GetManifest())
        link.post(Hello(WIRE_VERSION, bytes.fromhex(other.run_id), b""))
        await swarm.during(2.0)
        assert target.worker.services.links.traffic.refused["wrong_run"] == 1
        assert fixture.OWNER.peer_id not in target.worker.services.links.membership.peers
        ours = next(body for message, body in stranger.heard if isinstance(message, ManifestResponse))
        assert from_wire(ours, swarm.signed.run_id).manifest == swarm.signed.manifest
        with pytest.raises(RunFileError, match="not"):
            from_wire(ours, other.run_id)
        assert [message.code for message, _ in stranger.heard if isinstance(message, Refuse)] == ["wrong_run"]

    play(Swarm(tiny_manifest(), stub=True), story)


def test_a_newcomer_takes_the_stage_that_lost_a_peer_though_the_directory_still_lists_it():
    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: settled(swarm) >= 3, 60.0)
        await swarm.crash("d")
        await swarm.during(2.0)
        swarm.start("new")
        await swarm.until(lambda: contributes(swarm, "new"), 30.0)
        assert swarm.members["new"].worker.stage == 1

    play(Swarm(tiny_manifest(), stub=True), story)
