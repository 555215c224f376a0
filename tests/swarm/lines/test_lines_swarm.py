"""Real workers in memory, on a virtual clock: newcomers choose their stage by their lines as well."""

from __future__ import annotations

from dataclasses import replace

from clocks import on_virtual_clock
from swarm import TINY_MODEL, Swarm, tiny_manifest

from peers.compute.executor import UPDATE
from swarmnet.resources.link_bandwidth import LinkBandwidth

FOUR = tiny_manifest((1, 1, 1, 1), model=replace(TINY_MODEL, num_hidden_layers=4))
ACT = float(FOUR.body_bytes)
THIN, GOOD = LinkBandwidth(ACT, 100 * ACT), LinkBandwidth(200 * ACT, 1000 * ACT)
"""One microbatch a second at an end and half of one in the middle; more than any computer here."""


def slowly(priority: int) -> float:
    """Compute seconds of a piece of work; two to a microbatch."""
    return 0.001 if priority == UPDATE else 0.2


@on_virtual_clock
async def test_newcomers_with_good_lines_end_in_the_middle():
    swarm = Swarm(FOUR, stub=True)
    swarm.open()
    for stage, name in enumerate("abcd"):
        swarm.start(name, stage, line=THIN, compute=slowly, in_flight=1)
    workers = [swarm.members[name].worker for name in "abcd"]
    await swarm.until(lambda: all(worker.state == "training" for worker in workers), 60.0)
    await swarm.during(15.0)  # Records are signed anew, and tell speeds.
    for name, line in (("good", GOOD), ("fine", GOOD), ("thin", THIN), ("slow", THIN)):
        swarm.start(name, line=line, compute=slowly, in_flight=1)
        await swarm.until(lambda name=name: swarm.members[name].worker.state == "training", 60.0)
        await swarm.during(15.0)
    held = {name: swarm.members[name].worker.stage for name in ("good", "fine", "thin", "slow")}
    assert {held["good"], held["fine"]} == {1, 2}
    assert {held["thin"], held["slow"]} == {0, 3}
    # And who sends knows which of the two it sends to has the good line.
    router = swarm.members["a"].worker.services.pipeline_service.pipeline.router
    middle = next(name for name in ("good", "fine") if held[name] == 1)
    told = {name: router.peers[swarm.members[name].peer].compute_seconds for name in ("b", middle)}
    assert told["b"] == (FOUR.body_bytes + FOUR.gradient_bytes) / ACT
    assert 0 < told[middle] < 0.5
    await swarm.close()
