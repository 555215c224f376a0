"""Real workers in memory, on a virtual clock: newcomers choose their stage by their lines as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clocks import on_virtual_clock
from swarm import TINY_MODEL, Swarm, tiny_manifest

from peers.compute.executor import UPDATE, InlineCompute
from peers.compute.shared_executor import SharedCompute
from protocols.framing.same_process import Near
from swarmnet.resources.lines import Line, told_by_sibling

FOUR = tiny_manifest((1, 1, 1, 1), model=replace(TINY_MODEL, layers=4))
ACT = float(FOUR.body_bytes)
THIN, GOOD = Line(ACT, 100 * ACT), Line(200 * ACT, 1000 * ACT)
"""One microbatch a second at an end and half of one in the middle; more than any computer here."""


def slowly(priority: int) -> float:
    """Compute seconds of a piece of work; two to a microbatch."""
    return 0.001 if priority == UPDATE else 0.2


@on_virtual_clock
async def test_peers_tell_others_what_it_costs_their_line_to_enter_in_the_middle_of_what_they_hold():
    """`b` holds the second and third stage on a line that carries a microbatch a second."""
    swarm, told, near, held = Swarm(FOUR, stub=True), {}, Near(), range(1, 3)
    swarm.open()
    for stage, name in enumerate(("a0", "c1", "c2", "c3")):
        swarm.start(name, stage, compute=slowly, in_flight=4, slots=8)
    shared = SharedCompute(lambda: InlineCompute(slowly))
    for stage in held:
        line = told_by_sibling(Line(2 * ACT, 100 * ACT), FOUR, held, stage)
        place = {"shared": shared, "near": near, "line": line, "held": held}
        swarm.start(f"b{stage}", stage, in_flight=4, slots=8, **place)

    def known(by: str, of: str) -> float | None:
        data, peer = swarm.members[by].worker.data, swarm.members[of].peer
        estimate = data.router.peers.get(peer) if data is not None else None
        return estimate.compute_seconds if estimate is not None else None

    ways = [("a0", "b1"), ("c1", "b2"), ("b1", "b2"), ("c1", "c2")]
    await swarm.until(lambda: all(known(*way) for way in ways), 240.0)
    told.update({way: known(*way) for way in ways})
    await swarm.close()
    assert told["a0", "b1"] == pytest.approx(1.0, rel=0.05)
    assert told["c1", "b2"] == pytest.approx(2 * told["a0", "b1"])
    assert told["b1", "b2"] == pytest.approx(told["a0", "b1"]), "a sibling's microbatch passes both"
    assert told["c1", "c2"] < 1.0, "whose line nobody knows"
