"""The owner changes the mixture of the sources: all peers read by it from the same round on."""

from __future__ import annotations

import pytest
from clocks import on_virtual_clock
from owned_swarm import SIX, OwnedSwarm, settled
from swarm import Sampled, corpus, tiny_manifest

from swarmnet.run import owner_orders
from swarmnet.run.mixtures import MixtureChange
from swarmnet.run.owner_orders import NO_ORDER

pytestmark = pytest.mark.swarm
WEIGHTS = (("python", 2000), ("wiki", 500))


class Noted(Sampled):
    """A text that notes the mixture of each microbatch, and the round in which its peer cut it."""

    def microbatch(self, key, mixture=None):
        notes.append((key.origin, mixture))
        return super().microbatch(key)


notes: list[tuple[str, MixtureChange | None]] = []


@on_virtual_clock
async def test_every_peer_reads_by_the_new_mixture_from_its_round_on_and_newcomers_do(monkeypatch):
    notes.clear()
    swarm = OwnedSwarm(tiny_manifest((2, 1)), seed=3, stub=True)
    swarm.text = Noted(corpus(), swarm.signed.run_id, swarm.signed.manifest.data)
    swarm.open()
    for name, stage in SIX:
        swarm.start(name, stage)
    await swarm.until(lambda: settled(swarm) >= 3, 60.0)
    change = MixtureChange(12, WEIGHTS)
    given = await swarm.give(owner_orders.mixture(NO_ORDER, WEIGHTS, 12, "more code"), "a")
    assert given.order.mixtures == (change,)
    await swarm.until(lambda: swarm.knows(given), 5.0)

    def current(name):
        return swarm.members[name].worker.services.round_service.rounds.current

    firsts = [name for name, stage in SIX if stage == 0]
    await swarm.until(lambda: max(map(current, firsts)) >= 11, 60.0)
    await swarm.until(lambda: min(map(current, firsts)) >= 12, 60.0)
    peers = {swarm.members[name].peer for name in firsts}
    start = len(notes)
    assert {mixture for _, mixture in notes} == {None, change}
    late = swarm.start("late", 0)
    await swarm.until(lambda: settled(swarm) >= 20 and late.worker.state == "training", 120.0)
    await swarm.until(lambda: late.peer in {peer for peer, _ in notes}, 60.0)
    assert {mixture for _, mixture in notes[start:]} == {change}
    assert {peer for peer, _ in notes[start:]} == peers | {late.peer}
    for peer in peers:
        own = [mixture for one, mixture in notes if one == peer]
        assert own == sorted(own, key=lambda mixture: mixture is not None), "and never by the old one again"
    await swarm.close()
