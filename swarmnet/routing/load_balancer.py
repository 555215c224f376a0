"""Whom to send the next microbatch to: a virtual-time queue over the peers of the next stage.

SWARM (arXiv:2301.11913, section 3.2) lets every sender keep a virtual clock per peer: sending moves the
peer's clock on by what a microbatch costs there, and the next one goes to the peer whose clock is least. So
each peer gets work in proportion to its speed, evenly in time, and no two senders need to talk. The public
reference charges the time from request to answer, which is network and queues more than speed: a distant peer
that pipelines well gets too little, a near slow one too much. Here the charge is what a microbatch keeps the
peer busy, *told by the peer* (which alone can see it under concurrency) and multiplied by how many wait
there; the network costs nothing but microbatches in flight, which credits bound.

Everything is local: what was sent, what came back, and three numbers that each peer tells of itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from swarmnet.backoff import doubled
from swarmnet.identifiers import MicrobatchId, PeerId

SMOOTHING = 0.2
"""Weight of a new measurement; SWARM's 0.1 takes 20 microbatches to see a peer slow down."""
TIE = 0.1
"""Clocks that differ by less than this share of a charge are equal, and chance decides: else senders that
began together would go on sending to the same peer at the same time."""
OVERDUE = 0.4
"""Share of a missed deadline that is taken as the time an answer takes: five times that, the next deadline
(timeouts.DEADLINE_FACTOR), is twice as long."""
CATCH_UP = 4.0
"""A peer that was left out for a while gets at most so many microbatches at once afterwards."""
FIRST_SLOTS = 1
"""In flight to a peer that has told nothing: one, to hear. Many senders meet a slow peer at the same time."""
MOST_SLOTS = 1024
FIRST_BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 10.0
"""libp2p's dial back-off after a partition grows beyond retries more frequent than this."""
FIRST_SHUN_SECONDS, LONGEST_SHUN_SECONDS = 60.0, 3600.0
"""Some hundred rounds of the others for the few microbatches that it takes to see what a peer sends."""
BUSY_SECONDS, LONGEST_BUSY_SECONDS = 0.1, 2.0
"""A full peer has room again after about one microbatch; every further refusal in a row doubles the pause,
for each costs the sending of a body."""


@dataclass(slots=True)
class Estimate:
    """What is known of one peer."""

    compute_seconds: float | None = None
    """How long a microbatch keeps it busy, forward and backward; None until it was told."""
    waiting: float = 0.0
    """Smoothed count of microbatches that wait for its compute, as it tells."""
    answer_seconds: float | None = None
    """Smoothed time from sending to the answer: network, queues and everything below."""
    clock: float = 0.0
    """Virtual time at which it would have done all it was sent."""
    heard: bool = False
    """Whether it ever told anything."""
    in_flight: int = 0
    slots: int = FIRST_SLOTS
    """How many it takes from us at a time (CREDIT)."""
    earned: float = FIRST_SLOTS
    """How many it is given at a time, by what it has answered: one more for each answer while it has half of
    them, and half as many after a failure (slow start, Jacobson 1988). Slots are a claim, and microbatches
    that are swallowed cost a deadline."""
    peak: int = 0
    """The most in flight since its last answer."""
    failures: int = 0
    refusals: int = 0
    """BUSY in a row."""
    shuns: int = 0
    """Times that what it sends was found out of line."""
    failed_until: float = 0.0
    busy_until: float = 0.0
    shunned_until: float = 0.0

    @property
    def blocked_until(self) -> float:
        """A short pause does not end a longer one."""
        return max(self.failed_until, self.busy_until, self.shunned_until)

    def has_room(self, now: float) -> bool:
        return self.in_flight < min(self.slots, self.earned) and self.blocked_until <= now

    def has_earned(self, promised: int, now: float) -> bool:
        """One more, besides what is under way there and so many that are to follow."""
        return self.in_flight + promised < self.earned and self.blocked_until <= now


class Router:
    """Estimates and choices for the peers of one next stage."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.peers: dict[PeerId, Estimate] = {}
        self.clock = 0.0
        """Virtual time: the clock of the peer that was sent to last."""

    def choose(
        self, candidates: Iterable[PeerId], now: float, avoid: Collection[PeerId] = ()
    ) -> PeerId | None:
        """The peer for the next microbatch, or None if nobody has room. `avoid` only if nobody else has."""
        usable = [
            (peer, estimate)
            for peer in candidates
            for estimate in (self._estimate(peer),)
            if estimate.has_room(now)
        ]
        if avoid:
            usable = [entry for entry in usable if entry[0] not in avoid] or usable
        if not usable:
            return None
        unknown = self._cost_of_unknown()
        best, first = None, float("inf")
        due = []
        for peer, estimate in usable:
            cost = self._cost(estimate, unknown)
            done = estimate.clock + cost
            due.append((done - TIE * cost, peer))
            if done < first:
                best, first = peer, done
        tied = [peer for earliest, peer in due if earliest <= first]
        return self.chance.choice(tied) if len(tied) > 1 else best

    def has_room(self, candidates: Iterable[PeerId], now: float) -> bool:
        """Whether anybody would take one more."""
        for peer in candidates:
            estimate = self.peers.get(peer)
            if estimate is None or estimate.has_room(now):
                return True
        return False

    def room_at(self, candidates: Iterable[PeerId], now: float) -> float:
        """When the first of those that lack nothing but the end of a pause has room; infinity: none does."""
        return min(
            (
                estimate.blocked_until
                for peer in candidates
                if (estimate := self.peers.get(peer)) is not None
                and estimate.blocked_until > now
                and estimate.in_flight < min(estimate.slots, estimate.earned)
            ),
            default=float("inf"),
        )

    def is_usable(self, peer: PeerId, now: float) -> bool:
        """Whether it has not failed or been full just now."""
        estimate = self.peers.get(peer)
        return estimate is None or estimate.blocked_until <= now

    def has_earned(self, peer: PeerId, promised: int, now: float) -> bool:
        """Whether it may be promised one more besides `promised`, by what it has answered. Where places are
        asked for (peers/worker/pipeline/reservations.py), they stand for its slots."""
        estimate = self.peers.get(peer)
        return promised < FIRST_SLOTS if estimate is None else estimate.has_earned(promised, now)

    def sent(self, peer: PeerId) -> None:
        estimate = self._estimate(peer)
        estimate.in_flight += 1
        estimate.peak = max(estimate.peak, estimate.in_flight)
        cost = self._cost(estimate, self._cost_of_unknown())
        self.clock = max(self.clock, estimate.clock)
        estimate.clock = max(estimate.clock, self.clock - CATCH_UP * cost) + cost

    def answered(self, peer: PeerId, answer_seconds: float) -> None:
        """It came back so long after it was sent."""
        estimate = self._estimate(peer)
        known = estimate.answer_seconds
        estimate.answer_seconds = (
            answer_seconds if known is None else known + SMOOTHING * (answer_seconds - known)
        )
        estimate.failures = estimate.refusals = 0
        if 2 * estimate.peak >= estimate.earned:
            estimate.earned = min(MOST_SLOTS, estimate.earned + 1)
        estimate.peak = estimate.in_flight

    def told(self, peer: PeerId, slots: int, compute_seconds: float, waiting: int) -> None:
        """What a peer that was sent something says of itself (CREDIT): how many it takes from us at a time,
        its compute per microbatch (0: not measured yet), and how many pieces of work wait for that."""
        estimate = self.peers.get(peer)
        if estimate is None:
            return
        estimate.slots = max(0, min(slots, MOST_SLOTS))
        weight = SMOOTHING if estimate.heard else 1.0
        estimate.waiting += weight * (min(waiting, MOST_SLOTS) - estimate.waiting)
        estimate.heard = True
        if compute_seconds > 0:
            estimate.compute_seconds = compute_seconds

    def overdue(self, peer: PeerId, waited: float) -> None:
        """Nothing came for so long. It may be slower than known: the next one gets more time."""
        estimate = self._estimate(peer)
        estimate.answer_seconds = max(estimate.answer_seconds or 0.0, OVERDUE * waited)

    def expected_seconds(self, peer: PeerId) -> float | None:
        """How long an answer from there takes, as far as is known."""
        return self._estimate(peer).answer_seconds

    def ended(self, peer: PeerId) -> None:
        """One microbatch less is under way there, however it ended."""
        estimate = self.peers.get(peer)
        if estimate is not None and estimate.in_flight > 0:
            estimate.in_flight -= 1

    def failed(self, peer: PeerId, now: float) -> None:
        """It refused, was lost or missed a deadline: leave it alone for a while that doubles."""
        estimate = self._estimate(peer)
        if estimate.failed_until > now:
            return  # One failure, however many microbatches it meets.
        estimate.earned = max(FIRST_SLOTS, estimate.earned / 2)
        pause = doubled(FIRST_BACK_OFF_SECONDS, estimate.failures, LONGEST_BACK_OFF_SECONDS)
        estimate.failed_until = now + pause * self.chance.uniform(0.8, 1.2)
        estimate.failures += 1

    def shun(self, peer: PeerId, now: float) -> None:
        """What it sends is no good, whether it is asked or asks: nothing goes to it for long, and longer each
        time that it comes to this again."""
        estimate = self._estimate(peer)
        estimate.shunned_until = now + doubled(FIRST_SHUN_SECONDS, estimate.shuns, LONGEST_SHUN_SECONDS)
        estimate.shuns += 1

    def is_shunned(self, peer: PeerId, now: float) -> bool:
        estimate = self.peers.get(peer)
        return estimate is not None and estimate.shunned_until > now

    def busy(self, peer: PeerId, now: float) -> None:
        """It is full, not broken: a short pause, longer if it goes on."""
        estimate = self._estimate(peer)
        estimate.busy_until = now + doubled(BUSY_SECONDS, estimate.refusals, LONGEST_BUSY_SECONDS)
        estimate.refusals += 1

    def forget_others(self, known: Collection[PeerId], now: float) -> None:
        """Peers that are not known any more, once nothing is under way there and no pause is kept."""
        gone = [
            peer for peer, estimate in self.peers.items()
            if peer not in known and not estimate.in_flight and estimate.blocked_until <= now
        ]  # fmt: skip
        for peer in gone:
            del self.peers[peer]

    def _estimate(self, peer: PeerId) -> Estimate:
        """A peer not seen before begins at the present virtual time: it is tried at once."""
        estimate = self.peers.get(peer)
        if estimate is None:
            estimate = self.peers[peer] = Estimate(clock=self.clock)
        return estimate

    def _cost(self, estimate: Estimate, unknown: float) -> float:
        seconds = unknown if estimate.compute_seconds is None else estimate.compute_seconds
        return seconds * (1.0 + estimate.waiting)

    def _cost_of_unknown(self) -> float:
        """A peer that has told nothing counts as good as the best."""
        known = [e.compute_seconds for e in self.peers.values() if e.compute_seconds is not None]
        return min(known, default=1.0)


class Guide(Protocol):
    """Finds ways ahead of bodies (peers/worker/pipeline/reservations.py); without, the router chooses once
    the output is there."""

    def choose(
        self, key: MicrobatchId, candidates: Collection[PeerId], now: float, avoid: Collection[PeerId]
    ) -> PeerId | None:
        """The next peer of a microbatch; None: not yet."""

    def has_room(self, candidates: Collection[PeerId], now: float) -> bool:
        """Whether an origin may start one more."""

    def expects(self, key: MicrobatchId, sender: PeerId) -> bool:
        """Whether this microbatch has a place here: it may wait at the door until memory is free."""
