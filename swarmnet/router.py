"""Whom to send the next microbatch to (SWARM, arXiv:2301.11913, section 3.2, done with in-flight counts).

Each peer of the next stage has a measured service time; the next microbatch goes where it would be done
soonest: `(in flight + 1) * service seconds` is smallest. Near-ties are drawn by chance, so that senders
that measure alike do not all choose alike. Peers that fail are left alone for a while that doubles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random

from swarmnet.identifiers import PeerId

SMOOTHING = 0.2
"""Weight of a new measurement; SWARM's 0.1 takes 20 microbatches to see a peer slow down."""
TIE = 1.15
"""Scores within this factor of the best count as equal: measured times scatter by about as much."""
FIRST_BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 10.0
"""libp2p's dial back-off after a partition grows beyond retries more frequent than this."""


@dataclass(slots=True)
class Estimate:
    """What is known of one peer. `service_seconds` is None until something was measured."""

    service_seconds: float | None = None
    in_flight: int = 0
    slots: int = 4
    """How many it takes from us at a time (CREDIT)."""
    failures: int = 0
    blocked_until: float = 0.0


class Router:
    """Estimates and choices for the peers of one next stage."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.peers: dict[PeerId, Estimate] = {}

    def choose(
        self, candidates: Iterable[PeerId], now: float, avoid: Collection[PeerId] = ()
    ) -> PeerId | None:
        """The peer for the next microbatch, or None if nobody has room. `avoid` only if nobody else has."""
        usable = [
            (peer, estimate)
            for peer in candidates
            for estimate in (self.peers.setdefault(peer, Estimate()),)
            if estimate.in_flight < estimate.slots and estimate.blocked_until <= now
        ]
        usable = [entry for entry in usable if entry[0] not in avoid] or usable
        if not usable:
            return None
        known = [e.service_seconds for _, e in usable if e.service_seconds is not None]
        unknown = min(known, default=1.0)  # A new peer is tried at once, as good as the best.
        scores = {
            peer: (estimate.in_flight + 1)
            * (unknown if estimate.service_seconds is None else estimate.service_seconds)
            for peer, estimate in usable
        }
        best = min(scores.values())
        return self.chance.choice([peer for peer, score in scores.items() if score <= best * TIE])

    def sent(self, peer: PeerId) -> None:
        self.peers[peer].in_flight += 1

    def answered(self, peer: PeerId, service_seconds: float) -> None:
        """It did one in `service_seconds` of its own and its successors' compute."""
        estimate = self.peers.setdefault(peer, Estimate())
        known = estimate.service_seconds
        estimate.service_seconds = (
            service_seconds if known is None else known + SMOOTHING * (service_seconds - known)
        )
        estimate.failures = 0

    def ended(self, peer: PeerId) -> None:
        """One microbatch less is under way there, however it ended."""
        estimate = self.peers.get(peer)
        if estimate is not None and estimate.in_flight > 0:
            estimate.in_flight -= 1

    def failed(self, peer: PeerId, now: float) -> None:
        """It refused, was lost or missed a deadline: leave it alone for a while that doubles."""
        estimate = self.peers.setdefault(peer, Estimate())
        pause = min(LONGEST_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2**estimate.failures)
        estimate.blocked_until = now + pause * self.chance.uniform(0.8, 1.2)
        estimate.failures += 1

    def busy(self, peer: PeerId, now: float) -> None:
        """It is full, not broken: a short pause."""
        self.peers.setdefault(peer, Estimate()).blocked_until = now + 0.1

    def forget(self, peer: PeerId) -> None:
        self.peers.pop(peer, None)
