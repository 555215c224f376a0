"""A return to snapshots: all stages go back to what the owner named, whoever hears of it, and whenever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from archived import MANIFEST, SLOW, archived, trained
from clocks import on_virtual_clock
from owned_swarm import SIX, OwnedSwarm, settled
from swarm import tiny_manifest

from peers.config.errors import UserError
from peers.network.discovery.record_reader import look
from peers.network.discovery.visitor_session import RunConnection
from peers.stageless.archivist.archivist import Policy
from peers.state.archive import GIVEN_UP, Archive
from peers.state.archive_store import open_store
from peers.state.checkpoint_file import stage_and_round
from peers.tools.owner.return_points import find_points
from peers.tools.owner.rollback_cost import describe_return_cost
from protocols.signed.identity import Identity
from swarmnet.lineage import Return, era_of
from swarmnet.run import owner_orders

OLDEST = -1


def chain_of(swarm, name):
    return swarm.members[name].worker.services.round_service.rounds.chain


def newest_snapshots(swarm, names=("a", "d")):
    """For each stage, the round and digest of the older one of a peer's two snapshots."""
    serving = [swarm.members[name].worker.services for name in names]
    held = [of.snapshots.held if of is not None else () for of in serving]
    if not all(held):
        return ()
    return tuple((of[OLDEST].root.round, of[OLDEST].root.digest.hex()) for of in held)


def give_return(swarm, points, to):
    return swarm.give(owner_orders.return_to(swarm.order, points, "a liar"), to)


def have_returned(swarm, returned: Return, names: Sequence[str]):
    """Whether these peers continue from the points of the newest return."""
    return all(
        (services := swarm.members[name].worker.services) is not None
        and services.round_service.has_weights
        and era_of(chain_of(swarm, name).value) == returned.lineage(services.stage).era
        for name in names
    )


def agree(swarm, names=None):
    """How many pairs of peers of a stage have one chain; AssertionError if two have settled one round to
    different weights after the last return."""
    shared = 0
    for stage in (0, 1):
        by_round = {}
        for name, digests in swarm.digests(stage).items():
            for number, digest in digests.items() if names is None or name in names else ():
                by_round.setdefault(number, []).append(digest)
        assert [number for number, found in by_round.items() if len(set(found)) > 1] == []
        shared += sum(len(found) > 1 for found in by_round.values())
    return shared


def starts_with(tmp_path: Path, name: str, **settings):
    """Settings of a peer with a disk. Only c saves checkpoints all the time."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return {
        "checkpoints": folder,
        "orders": folder / "order.bin",
        "checkpoint_seconds": 0.4 * (name == "c"),
        **settings,
    }


def newest_file(folder: Path) -> int:
    """The round of the newest checkpoint in a folder; -1 without any."""
    return max((stage_and_round(path)[1] for path in folder.glob("*.safetensors")), default=-1)


def begin(tmp_path, seed=3, stages=SIX):
    swarm = OwnedSwarm(tiny_manifest((2, 1)), seed=seed, stub=True)
    swarm.open()
    for name, stage in stages:
        swarm.start(name, stage, **starts_with(tmp_path, name))
    return swarm


@on_virtual_clock
async def test_all_stages_return_with_one_peer_offline_and_one_that_joins_later(tmp_path):
    swarm = begin(tmp_path)
    await swarm.until(lambda: settled(swarm) >= 14, 90.0)
    points = newest_snapshots(swarm)
    await swarm.until(lambda: newest_file(tmp_path / "c") > points[0][0], 60.0)
    await swarm.crash("c")
    before = {name: settled(swarm, name) for name in "abdef"}
    await give_return(swarm, points, "a")
    returned = swarm.order.returned
    await swarm.until(lambda: have_returned(swarm, returned, "abdef"), 60.0)
    assert all(chain_of(swarm, name).start == points[name in "def"][0] for name in "abdef")
    assert settled(swarm) < min(before.values())
    await swarm.until(lambda: settled(swarm, *"abdef") >= max(before.values()) + 6, 120.0)
    swarm.start("c", 0, **starts_with(tmp_path, "c"))  # It knows a longer history, and no order.
    swarm.start("late", 1, **starts_with(tmp_path, "late"))
    everybody = ["a", "b", "c", "d", "e", "f", "late"]
    await swarm.until(lambda: have_returned(swarm, returned, everybody), 90.0)
    until = settled(swarm, "a") + 8
    await swarm.until(lambda: settled(swarm, *everybody) >= until, 90.0)
    await swarm.close()
    assert agree(swarm) > 20
    assert list((tmp_path / "c").glob(f"*{GIVEN_UP}")), "its newer checkpoints are kept under another name"
    assert not [path for path in (tmp_path / "a").glob("*") if path.suffix == ".part"]


@on_virtual_clock
async def test_peers_that_never_hear_of_it_cannot_bring_the_longer_branch_back(tmp_path):
    """Two of three peers of a stage ignore all orders and train on."""
    swarm = begin(tmp_path)
    await swarm.until(lambda: settled(swarm) >= 14, 90.0)
    for name in "bcef":
        book = swarm.members[name].worker.orders.book
        book.take, book.accept = lambda data: True, lambda order: False
    points = newest_snapshots(swarm)
    await give_return(swarm, points, "a")
    await swarm.during(1.0)
    await swarm.send(swarm.sealed(swarm.order).data, "d")
    returned = swarm.order.returned
    await swarm.until(lambda: have_returned(swarm, returned, "ad"), 60.0)
    first = settled(swarm, "a", "d")
    await swarm.until(lambda: settled(swarm, "a", "d") >= first + 20, 240.0)
    assert settled(swarm, "b", "c", "e", "f") > settled(swarm, "a", "d")
    newcomer = swarm.start("late", 0, **starts_with(tmp_path, "late"))  # The directory has no order.
    await swarm.until(lambda: have_returned(swarm, returned, ["a", "d", "late"]), 120.0)
    until = settled(swarm, "a") + 8
    await swarm.until(lambda: settled(swarm, "a", "late") >= until, 90.0)
    assert newcomer.worker.orders.book.order.returned == returned
    await swarm.close()
    assert agree(swarm, ["a", "d", "late"]) > 4


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
@on_virtual_clock
async def test_a_return_that_reaches_peers_at_any_time_leaves_one_history(tmp_path, seed):
    """Two returns, the second maybe before all obey the first; links break, a peer dies, newcomers come."""
    swarm = begin(tmp_path, seed)
    chance = swarm.network.random
    await swarm.until(lambda: settled(swarm) >= 9, 60.0)
    everybody = {member.peer for member in swarm.members.values()}
    await swarm.crash("c")
    for _ in range(2):
        await swarm.until(lambda: newest_snapshots(swarm), 60.0)
        points = newest_snapshots(swarm)
        if chance.random() < 0.5:
            away = {swarm.members[name].peer for name in chance.sample("bef", 2)}
            swarm.network.partition(away, everybody - away)
        await give_return(swarm, points, chance.choice("ad"))
        await swarm.during(chance.uniform(0.0, 8.0))
        swarm.network.heal()
        await swarm.during(chance.uniform(0.0, 3.0))
    swarm.start("c", 0, **starts_with(tmp_path, "c"))
    swarm.start("late", 1)
    names, returned = ["a", "b", "c", "d", "e", "f", "late"], swarm.order.returned
    await swarm.until(lambda: have_returned(swarm, returned, names), 240.0)
    until = max(settled(swarm, name) for name in names) + 8
    await swarm.until(lambda: settled(swarm, *names) >= until, 240.0)
    await swarm.close()
    assert agree(swarm) > 10


def visitor(swarm) -> RunConnection:
    """The owner's connection to the run."""
    me = Identity.from_seed(b"a visitor").peer_id
    transport, directory = swarm.network.transport(me), swarm.network.directory(me)
    return cast(RunConnection, SimpleNamespace(signed=swarm.signed, transport=transport, directory=directory))


@on_virtual_clock
async def test_the_owner_finds_what_peers_have_and_they_keep_it():
    swarm = OwnedSwarm(MANIFEST, seed=3)
    await trained(swarm, dict(SIX), 12, compute=SLOW)
    found = visitor(swarm)
    points = await find_points(found, 10_000, "")
    held = {name: swarm.members[name].worker.services.snapshots for name in ("a", "d")}
    assert all(held[name].find(points[stage].root[1]) for stage, name in enumerate(("a", "d")))
    assert [point.source for point in points] == ["3 peers", "3 peers"]
    assert all(point.tokens for point in points)
    await swarm.until(lambda: held["a"].newest_round() > points[0].root[0] + 12, 60.0)
    assert all(held[name].find(points[stage].root[1]) for stage, name in enumerate(("a", "d")))
    with pytest.raises(UserError, match=r"stage 0 has no snapshot of round 2 or before.* no archive"):
        await find_points(found, 2, "")
    records = [signed.record for signed in (await look(found.directory, swarm.signed.run_id, 2)).values()]
    cost = describe_return_cost(records, points)
    assert cost[0].startswith(f"stage 0: to round {points[0].root[0]} (3 peers); given up: ")
    assert "tokens" in cost[2]
    await swarm.close()


@on_virtual_clock
async def test_an_archive_gives_what_no_peer_has_any_more_and_keeps_what_is_given_up(tmp_path):
    swarm = OwnedSwarm(MANIFEST, seed=4)
    await trained(swarm, {"a": 0, "b": 0, "c": 1, "d": 1}, 5, compute=SLOW)
    archivist, archive, _ = await archived(swarm, str(tmp_path), Policy(newest=4))
    await archivist.once()
    kept = [archive.newest(stage)[0].round for stage in (0, 1)]
    await swarm.until(lambda: settled(swarm) >= max(kept) + 13, 90.0)
    await archivist.once()
    later = [archive.newest(stage)[0].round for stage in (0, 1)]
    found = visitor(swarm)
    points = await find_points(found, max(kept), str(tmp_path))
    assert [point.root[0] for point in points] == kept
    roots = tuple((round, digest.hex()) for round, digest in (point.root for point in points))
    order = await give_return(swarm, roots, "a")
    returned = swarm.order.returned
    archivist.book.take(order.data)
    await archivist.once()  # No peer trains now; it sets aside what is newer, and serves the others.
    assert [archive.newest(stage)[0].round for stage in (0, 1)] == kept
    assert len(list(tmp_path.glob(f"*{GIVEN_UP}"))) == 2
    await swarm.until(lambda: have_returned(swarm, returned, "abcd"), 120.0)
    await swarm.until(lambda: settled(swarm) >= max(kept) + 6, 90.0)
    await archivist.once()
    assert all(kept[stage] < archive.newest(stage)[0].round <= later[stage] for stage in (0, 1))
    again = Archive(open_store(str(tmp_path)))
    again.open()
    assert again.orders() == [order.data]
    assert again.damaged() == []
    archivist.circle.close()
    await swarm.close()
    assert agree(swarm) > 4
