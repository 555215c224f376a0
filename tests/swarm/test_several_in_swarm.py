"""Peers that hold several adjacent stages, in memory on a virtual clock: they take part like any others."""

from collections import Counter

import pytest
from swarm import Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.compute.executor import FORWARD, InlineCompute
from peers.compute.shared_executor import SharedCompute
from peers.lab.world.virtual_time import run

FORWARD_SECONDS = 0.2


class Doubles(Swarm):
    """Peers named by a letter; one that holds two stages is two workers, `a0` and `a1`."""

    def cost(self, priority):
        return FORWARD_SECONDS if priority == FORWARD else 0.001

    def hold(self, name, first, stages=1):
        """A computer with adjacent stages."""
        shared = SharedCompute(lambda: InlineCompute(self.cost))
        for stage in range(first, first + stages):
            self.start(f"{name}{stage}", stage, shared=shared, in_flight=16, slots=16)

    async def kill(self, *names):
        for name in names:
            await self.crash(name)

    def done(self, name, began, ended):
        return sum(began <= note.time < ended for note in self.of("committed", name))


@pytest.mark.parametrize("seed", range(4))
def test_two_peers_of_two_stages_and_two_of_one_agree_and_the_death_of_a_double_one_is_survived(seed):
    swarm = Doubles(tiny_manifest((1, 1, 1)), seed, stub=True)
    told = {}

    async def story():
        swarm.open()
        swarm.hold("a", 0, 2)
        swarm.hold("b", 1, 2)
        swarm.hold("c", 0)
        swarm.hold("d", 2)
        await swarm.until(lambda: len(swarm.of("settled", "b2")) > 2, 120.0)
        told["shared"] = shared_rounds(swarm)
        await swarm.during(0.37 * seed)
        await swarm.kill("a0", "a1")
        killed = swarm.loop.time()
        await swarm.until(lambda: swarm.done("c0", killed, 1e9) > 16, 120.0)
        settled = swarm.rounds()["c0"][1]
        await swarm.until(lambda: swarm.rounds()["c0"][1] > settled + 1, 60.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert told["shared"] > 2
    assert shared_rounds(swarm) > told["shared"]


def test_a_stage_shares_its_work_by_what_a_computer_can_do_in_all_its_stages():
    """Stage 1: a double peer, and a single one as fast. The double one can do half as many there."""
    swarm = Doubles(tiny_manifest((1, 1, 1)), stub=True)
    done = Counter()

    async def story():
        swarm.open()
        swarm.hold("a", 0)
        swarm.hold("b", 1, 2)
        swarm.hold("c", 1)
        swarm.hold("d", 2)
        await swarm.until(lambda: swarm.committed(0) > 16, 120.0)
        began = swarm.loop.time()
        await swarm.during(20.0)
        for name in swarm.members:
            done[name] = swarm.done(name, began, began + 20.0)
        seconds = {name: member.worker.data.service_seconds for name, member in swarm.members.items()}
        assert abs(seconds["b1"] - seconds["b2"]) < 0.01, "both say what both take"
        assert seconds["b1"] > 1.6 * seconds["c1"]
        await swarm.close()

    run(story())
    assert done["a0"] > 0.85 * 20.0 / (FORWARD_SECONDS + 0.002), "the first stage is the narrow one: full"
    assert 1.3 * done["b1"] < done["c1"]
