"""A paused peer as others see it, and the reasons of a pause."""

import asyncio

from clocks import on_virtual_clock
from swarm import Swarm, tiny_manifest

from peers.network.discovery.announcer import LOOK_SECONDS
from peers.network.discovery.claims import Claims
from peers.worker.pause.pausing import PauseControl
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import open_record


def test_a_peer_is_paused_while_any_reason_stands():
    pausing = PauseControl()
    pausing.pause("user")
    pausing.pause("idle", "a game runs")
    pausing.resume("user")
    pausing.resume("schedule")
    assert pausing.texts == {"idle": "a game runs"}
    pausing.resume("idle")
    assert not pausing


async def test_who_waits_for_a_pause_hears_that_it_was_taken_back():
    pausing = PauseControl()
    pausing.pause("user")
    waiting = asyncio.create_task(pausing.rested())
    await asyncio.sleep(0)
    pausing.resume("user")
    assert not await waiting
    pausing.pause("user")
    waiting = asyncio.create_task(pausing.rested())
    await asyncio.sleep(0)
    pausing.resting.set()
    assert await waiting


@on_virtual_clock
async def test_in_a_swarm_the_others_go_on_without_a_paused_peer_and_it_counts_again_when_it_is_back():
    swarm = Swarm(tiny_manifest(stages=(1, 2)))
    swarm.open()
    first, second = swarm.start("a", stage=0), swarm.start("b", stage=0)
    last = swarm.start("c", stage=1)
    await swarm.until(lambda: swarm.committed(0) > 20, 60.0)
    second.worker.leave(2.5, "pausing")
    await swarm.until(lambda: second.task.done(), 5.0)
    for member in (first, last):
        others = member.worker.services.links
        assert second.peer not in others.membership.peers
        assert others.traffic.departures["paused"] == 1
        paused = second.worker.context.presence.record(NO_STAGE, Claims("paused"))
        assert others.learn(paused) == second.peer
        assert others.membership.peers[second.peer].stage == NO_STAGE
        assert second.peer not in others.membership.to_dial(1e9), "known to rest"
    before = swarm.committed(0)
    await swarm.until(lambda: swarm.committed(0) > before + 20, 60.0)
    await swarm.close()


@on_virtual_clock
async def test_whoever_was_told_goodbye_does_not_dial_though_the_directory_still_has_the_last_record():
    swarm = Swarm(tiny_manifest(stages=(1, 2)), stub=True)
    swarm.open()
    first, second, last = swarm.start("a", stage=0), swarm.start("b", stage=0), swarm.start("c", stage=1)
    await swarm.until(lambda: swarm.committed(0) > 20, 60.0)
    known = [member.worker.services.links.membership.peers[second.peer] for member in (first, last)]
    before = max(one.sequence for one in known)
    second.worker.leave(2.5, "pausing")
    await swarm.until(lambda: second.task.done(), 5.0)
    listed = await first.worker.context.presence.look_up(0)
    assert open_record(listed[second.peer], swarm.signed.run_id).sequence > before, "made while it left"
    said = len(swarm.of("linked")) + len(swarm.of("dial_failed"))
    await swarm.during(3 * LOOK_SECONDS)
    assert len(swarm.of("linked")) + len(swarm.of("dial_failed")) == said
    await swarm.close()
