"""Two other rules of routing, to measure ours against. Both are used only here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from random import Random

from swarmnet.identifiers import PeerId
from swarmnet.routing.load_balancer import MOST_SLOTS, Estimate, Router

REFERENCE_SMOOTHING = 0.1
REFERENCE_FIRST_SECONDS = 1.0
"""The reference's: weight of a new measurement, and what it takes a peer for that it has not measured."""


class RandomRouter(Router):
    """Any live peer, all alike. It knows no credit: who is full says BUSY."""

    def choose(
        self, candidates: Iterable[PeerId], now: float, avoid: Collection[PeerId] = ()
    ) -> PeerId | None:
        usable = self._open(candidates, now, avoid)
        return self.chance.choice(usable) if usable else None

    def told(self, peer: PeerId, slots: int, compute_seconds: float, waiting: int) -> None:
        """Not used."""

    def _open(self, candidates: Iterable[PeerId], now: float, avoid: Collection[PeerId]) -> list[PeerId]:
        usable = [peer for peer in candidates if self._estimate(peer).blocked_until <= now]
        return [peer for peer in usable if peer not in avoid] or usable

    def _estimate(self, peer: PeerId) -> Estimate:
        estimate = super()._estimate(peer)
        estimate.slots = MOST_SLOTS
        return estimate


class LatencyRouter(RandomRouter):
    """The public reference of SWARM (`lib/client/balancer.py`): one heap of (virtual time, chance) per stage,
    charged by the smoothed seconds from a request to its answer.

    There a request covers one stage, so the simulator hands in the time without that of the stages below.
    """

    def __init__(self, chance: Random, is_near: Callable[[PeerId], bool] | None = None) -> None:
        super().__init__(chance, is_near)
        self.request_seconds: dict[PeerId, float] = {}

    def measured(self, peer: PeerId, seconds: float) -> None:
        """A request took so long: network, queue and compute of that peer's stage."""
        known = self.request_seconds.get(peer)
        self.request_seconds[peer] = (
            seconds if known is None else known + REFERENCE_SMOOTHING * (seconds - known)
        )

    def choose(
        self, candidates: Iterable[PeerId], now: float, avoid: Collection[PeerId] = ()
    ) -> PeerId | None:
        usable = self._open(candidates, now, avoid)
        if not usable:
            return None
        return min(usable, key=lambda peer: (self.peers[peer].clock, self.chance.random()))

    def sent(self, peer: PeerId) -> None:
        estimate = self._estimate(peer)
        estimate.in_flight += 1
        self.clock = max(self.clock, estimate.clock)
        estimate.clock += self.request_seconds.get(peer, REFERENCE_FIRST_SECONDS)
