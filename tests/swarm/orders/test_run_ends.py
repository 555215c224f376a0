"""A run that its owner ends, and one whose peers are all gone."""

from __future__ import annotations

import asyncio
import re

import pytest
from clocks import on_virtual_clock
from owned_swarm import OwnedSwarm, settled, six
from swarm import announcer, shared_rounds, tiny_manifest

from peers.config.errors import UserError
from peers.network.discovery.claims import Claims
from peers.network.discovery.height import HighestFinalizedRound
from peers.state import checkpoint_file
from protocols.signed.identity import Identity
from protocols.signed.peer_record import NO_STAGE, PeerRecord
from protocols.signed.records import SignedRecord
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER

REMEMBERS = Identity.from_seed(b"the bootstrap")


async def remembered(swarm, round, role="bootstrap"):
    """A bootstrap tells how far the run has come."""
    transport = swarm.network.transport(REMEMBERS.peer_id)
    directory = swarm.network.directory(REMEMBERS.peer_id)
    presence = announcer(swarm.signed, REMEMBERS, transport, directory)

    async def forever():
        while True:
            record = presence.record(NO_STAGE, Claims("serving", "", role, settled=round))
            await directory.announce(swarm.signed.run_id, NO_STAGE, record, 5.0)
            await asyncio.sleep(30.0)

    return swarm.loop.create_task(forever())


def said(member, event):
    return [text for name, text in member.said if name == event]


# -- an ordered end -----------------------------------------------------------------------------------


@on_virtual_clock
async def test_a_run_ends_at_the_round_that_its_owner_names_and_all_have_saved_it(tmp_path):
    swarm = OwnedSwarm(tiny_manifest((2, 1)), seed=3, stub=True)
    swarm.open()
    for name, stage in (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 1)):
        swarm.start(name, stage, checkpoints=tmp_path / name)
    await swarm.until(lambda: settled(swarm) >= 3, 60.0)
    order = await swarm.give(owner_orders.end(NO_ORDER, 11, "it is good enough"), "d")
    first, last = [swarm.members[name] for name in "abc"], [swarm.members[name] for name in "de"]
    await swarm.until(lambda: all(member.worker.served.ending.round == 11 for member in first), 120.0)
    await swarm.until(lambda: all(member.worker.served.ending.round for member in last), 60.0)
    assert {member.worker.state for member in swarm.members.values()} == {"ended"}
    late = swarm.start("f", 0, checkpoints=tmp_path / "f")  # There are peers still to take it from.
    await swarm.until(lambda: late.worker.served.ended_at == 11, 40.0)
    for member in swarm.members.values():
        await asyncio.wait_for(member.task, 120.0)  # By itself.
        member.dead = True
    assert not swarm.of("resync")
    assert len({member.worker.served.ending.round for member in last}) == 1
    for name in "abcf":
        assert checkpoint_file.read(checkpoint_file.files(tmp_path / name, 0)[0]).round == 11
    swarm.check()
    assert max(round for found in swarm.digests(0).values() for round in found) == 11
    assert shared_rounds(swarm) > 15
    remembering = await remembered(swarm, 11)
    await swarm.network.directory(REMEMBERS.peer_id).put_order(swarm.signed.run_id, order.data, 5.0)
    for name, stage in (("a", 0), ("e", 1)):
        swarm.network.crash(swarm.members[name].peer)
        again = swarm.start(name, stage, checkpoints=tmp_path / name)
        with pytest.raises(UserError, match="has ended at round 11"):
            await swarm.end_of(again)
        assert not said(again, "trains")
        again.dead = True
    remembering.cancel()


@on_virtual_clock
async def test_one_forged_record_brings_no_end():
    swarm = six(stub=True)
    await swarm.until(lambda: settled(swarm) >= 3, 60.0)
    remembering = await remembered(swarm, 2**31)
    await swarm.give(owner_orders.end(NO_ORDER, 10**6, ""), "a")
    await swarm.until(lambda: settled(swarm) >= 40, 120.0)
    assert not swarm.of("run_ended")
    remembering.cancel()
    await swarm.close()


@on_virtual_clock
async def test_an_end_that_is_past_ends_the_run_where_it_is():
    swarm = six(stub=True)
    await swarm.until(lambda: settled(swarm) >= 6, 60.0)
    await swarm.give(owner_orders.end(NO_ORDER, 2, ""), "a")
    members = swarm.members.values()
    await swarm.until(lambda: all(member.worker.served.ending.round for member in members), 120.0)
    for stage in (0, 1):
        assert len({m.worker.served.ending.round for m in members if m.worker.stage == stage}) == 1
    await swarm.close()
    shared_rounds(swarm)


@on_virtual_clock
async def test_who_comes_to_a_run_that_has_ended_is_told_so():
    swarm = OwnedSwarm(tiny_manifest((2, 1)), stub=True)
    swarm.open()
    remembering = await remembered(swarm, 13)
    order = swarm.sealed(owner_orders.end(NO_ORDER, 11, ""))
    await swarm.network.directory(REMEMBERS.peer_id).put_order(swarm.signed.run_id, order.data, 5.0)
    late = swarm.start("a", 0)
    with pytest.raises(UserError, match=r"has ended at round 13.*`swarmnet export"):
        await swarm.end_of(late)
    late.dead = True
    remembering.cancel()
    await swarm.close()


# -- nobody is there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gone_seconds", [0.0, 130.0], ids=["just gone", "long gone"])
@on_virtual_clock
async def test_who_has_no_weights_waits_for_those_who_have_and_takes_them_at_once(tmp_path, gone_seconds):
    """The records of those who are gone run out after two minutes; a bootstrap tells it then."""
    swarm = OwnedSwarm(tiny_manifest((2, 1)), seed=3, stub=True)
    swarm.open()
    swarm.start("a", 0, checkpoints=tmp_path / "a")
    swarm.start("b", 1, checkpoints=tmp_path / "b")
    await swarm.until(lambda: settled(swarm) >= 10, 60.0)
    at = settled(swarm)
    await swarm.leave("a", "b")
    for name in "ab":
        await swarm.members[name].worker.context.transport.close()
    await swarm.during(gone_seconds)
    remembering = await remembered(swarm, at if gone_seconds else -1)
    newcomers = [swarm.start("c", 0), swarm.start("d", 0)]
    await swarm.during(90.0)
    for one in newcomers:
        assert not one.worker.has_weights()
        [told] = said(one, "elsewhere")
        assert int(re.search(r"has come to round (\d+), and no peer", told)[1]) in range(at, at + 3)
    swarm.start("a", 0, checkpoints=tmp_path / "a")
    swarm.start("b", 1, checkpoints=tmp_path / "b")
    await swarm.until(lambda: settled(swarm) >= at + 4, 60.0)
    remembering.cancel()
    await swarm.close()
    shared_rounds(swarm)


@pytest.mark.parametrize(
    ("height", "role", "settings"),
    [(2, "bootstrap", {}), (2**31, "observer", {}), (2**31, "bootstrap", {"allow_reinit": True})],
    ids=["hardly began", "nobody who remembers", "a person knows better"],
)
@on_virtual_clock
async def test_a_new_run_begins_from_its_seed(height, role, settings):
    swarm = OwnedSwarm(tiny_manifest((2, 1)), stub=True)
    swarm.open()
    remembering = await remembered(swarm, height, role)
    swarm.start("a", 0, **settings)
    swarm.start("b", 1, **settings)
    await swarm.until(lambda: settled(swarm) >= 2, 60.0)
    remembering.cancel()
    await swarm.close()


def test_a_bootstrap_remembers_the_highest_round_that_most_of_the_first_stage_say(tmp_path):
    def record(stage, settled, state="training", age=0.0):
        told = PeerRecord("p", stage, "worker", [], settled + 1, 0.0, "", state=state, settled=settled)
        return SignedRecord(told, "p", int((1000.0 - age) * 1e6))

    height = HighestFinalizedRound(tmp_path / "height.json")
    assert (height.round, height.trained) == (-1, False)
    others = [record(1, 90), record(0, 2**31, "joining")]
    height.saw([record(0, 30), record(0, 31), record(0, 2**31), *others], 1000.0)
    assert (height.round, height.trained) == (31, True)
    height.saw([record(0, 4, age=80.0)], 1000.0)  # Killed: it would have said more since.
    assert (height.round, height.trained) == (31, False)
    height.saw([], 1000.0)
    assert (height.round, height.trained) == (31, False)
    assert HighestFinalizedRound(tmp_path / "height.json").round == 31
    (tmp_path / "height.json").write_text("{")
    assert HighestFinalizedRound(tmp_path / "height.json").round == -1
