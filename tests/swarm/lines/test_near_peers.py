"""Peers on one machine are peers like any others: their links are preferred for the time that they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swarm import TINY_MODEL, Swarm, nothing_is_committed_twice, tiny_manifest

from peers.compute.executor import FORWARD
from peers.lab.world.virtual_time import run
from protocols.memory.conditions import Conditions
from swarmnet.run.schema import Paths

PEERS = {"a": 0, "b1": 1, "b2": 1, "c": 2, "d": 3}
"""Name -> stage. All but one of stage 1 are on one machine."""
LOOPBACK = Conditions(latency_seconds=0.0001)


def cost(priority: int) -> float:
    return 0.05 if priority == FORWARD else 0.01


def committed(away: str, paths: Paths, in_flight: int, away_seconds: float) -> tuple[int, int]:
    """How many microbatches the peer of stage 1 on the machine did, and `away`, which computes as fast."""
    manifest = tiny_manifest((1,) * 4, model=replace(TINY_MODEL, num_hidden_layers=4), paths=paths)
    swarm, found = Swarm(manifest, conditions=Conditions(latency_seconds=away_seconds), stub=True), {}

    async def story() -> None:
        swarm.open()
        for name, stage in PEERS.items():
            swarm.start(name, stage, compute=cost, in_flight=in_flight, slots=32)
        machine = [member.peer for name, member in swarm.members.items() if name != away]
        for one in machine:
            for other in machine:
                swarm.network.set(one, other, LOOPBACK)
        await swarm.until(lambda: swarm.committed(0) >= 100, 240.0)
        found.update({name == away: len(swarm.of("committed", name)) for name in ("b1", "b2")})
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    return found[False], found[True]


@pytest.mark.parametrize("away", ["b1", pytest.param("b2", marks=pytest.mark.soak)])
def test_where_ways_are_chosen_a_measured_hop_on_the_same_machine_comes_first(away):
    here, there = committed(away, Paths(0.25), 4, 0.05)
    assert here > 5 * there


@pytest.mark.parametrize("away", ["b1", pytest.param("b2", marks=pytest.mark.soak)])
def test_where_every_stage_is_visited_a_far_peer_gets_less_as_its_answers_come_later(away):
    here, there = committed(away, Paths(), 16, 0.5)
    assert here > 1.3 * there
    assert there > 0
