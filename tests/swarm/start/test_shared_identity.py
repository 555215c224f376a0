"""Two processes with one identity: the later one ends, and a plain restart is not taken for that."""

from __future__ import annotations

import asyncio

import pytest
from archived import SLOW
from clocks import on_virtual_clock
from swarm import Swarm, tiny_manifest

from peers.config.errors import IdentityInUse
from peers.network.discovery.height import OTHER_MAY_RUN
from protocols.signed.identity import Identity
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import RECORD_SECONDS, seal_record

X = Identity.from_seed(b"x")
RENEW_SECONDS = 10.0


def seal_other(swarm: Swarm, stage: int, started: float) -> bytes:
    """The record of another process with X's key, signed now."""
    record = PeerRecord(
        X.peer_id, stage, "worker", ["/memory/other"], 0, 0.0, "0", started=int(started * 1e6)
    )
    return seal_record(X, swarm.signed.run_id, record, swarm.loop.time())


async def renew(swarm: Swarm, stage: int, started: float, heard_by: str) -> None:
    """The other process announces itself in the directory, or only to one peer."""
    directory = swarm.network.directory(X.peer_id)
    while True:
        data = seal_other(swarm, stage, started)
        if heard_by:
            neighbourhood = swarm.members[heard_by].worker.services.links
            assert neighbourhood is not None
            neighbourhood.learn(data)
        else:
            await directory.announce(swarm.signed.run_id, stage, data, 10.0)
        await asyncio.sleep(RENEW_SECONDS)


async def begin(swarm: Swarm) -> None:
    """Two peers of the first stage, one of each other; they train."""
    swarm.open()
    for name, stage in {"a": 0, "b": 0, "c": 1, "d": 2}.items():
        swarm.start(name, stage, compute=SLOW)
    await swarm.until(lambda: swarm.committed(0) > 5, 60.0)


@pytest.mark.parametrize(("stage", "heard_by"), [(0, ""), (2, ""), (0, "a")])
@on_virtual_clock
async def test_the_later_process_ends_and_the_others_go_on(stage, heard_by):
    swarm = Swarm(tiny_manifest(), stub=True)
    await begin(swarm)
    other = asyncio.create_task(renew(swarm, stage, swarm.loop.time(), heard_by))
    await asyncio.sleep(5.0)
    later = swarm.start("x", 0, compute=SLOW)
    began = swarm.loop.time()
    done, _ = await asyncio.wait([later.task], timeout=60.0)
    later.dead = True
    other.cancel()
    assert done, "it still runs beside the other process"
    with pytest.raises(IdentityInUse, match="started at 1970-01-01"):
        later.task.result()
    assert swarm.loop.time() - began <= 60.0
    assert not [note for note in swarm.of("unlinked") if note.fields["code"] == "left"]
    await swarm.close()


@on_virtual_clock
async def test_the_earlier_process_goes_on_and_answers_at_once():
    swarm = Swarm(tiny_manifest(), stub=True)
    await begin(swarm)
    earlier = swarm.start("x", 0, compute=SLOW)
    await swarm.until(lambda: earlier.worker.state == "training", 60.0)
    other = asyncio.create_task(renew(swarm, 0, swarm.loop.time(), ""))
    before = earlier.worker.context.presence.own_start.number
    await asyncio.sleep(RENEW_SECONDS + 1.0)
    assert [topic for topic, _ in earlier.said if topic == "identity_shared"] == ["identity_shared"]
    other.cancel()
    assert earlier.worker.context.presence.own_start.number == before
    await swarm.close()


@on_virtual_clock
async def test_a_peer_that_is_killed_and_started_again_within_a_second_goes_on():
    swarm = Swarm(tiny_manifest(), stub=True)
    await begin(swarm)
    first = swarm.start("x", 0, compute=SLOW)
    await swarm.until(lambda: first.worker.state == "training", 60.0)
    await swarm.crash("x")
    await asyncio.sleep(0.5)
    again = swarm.start("x", 0, compute=SLOW)
    await swarm.during(50.0)  # The directory is looked at every 10 s.
    assert again.worker.state == "training"
    await swarm.close()


@on_virtual_clock
async def test_a_stage_is_stuck_only_when_no_other_process_of_this_identity_can_hold_its_weights():
    swarm = Swarm(tiny_manifest((2, 1)), stub=True)
    swarm.open()
    swarm.start("x", 0)
    swarm.start("c", 1)
    await swarm.until(lambda: swarm.committed(0) > 200, 120.0)
    await swarm.crash("x")
    again = swarm.start("x")  # It has no disk, as a copy of the key on another computer.
    await swarm.during(RECORD_SECONDS - 30.0)
    messages = [text for topic, text in again.said if topic == "elsewhere"]
    assert messages == [OTHER_MAY_RUN]
    await swarm.during(60.0)
    messages = [text for topic, text in again.said if topic == "elsewhere"]
    assert len(messages) == 2
    assert messages[1].startswith("stage 0 is stuck")
    await swarm.close()
