"""Choose the peer for the next microbatch with a virtual clock for each peer of the next stage.

SWARM (arXiv:2301.11913, section 3.2) lets every sender keep a virtual clock per peer. Each send advances the
peer's clock by the cost of a microbatch there. The next microbatch goes to the peer with the earliest clock.
Each peer gets work in proportion to its speed, evenly in time, and senders need not coordinate. The public
reference charges the time from request to answer, which depends more on network and queues than on speed. A
distant peer that pipelines well then gets too little, and a near slow peer too much. This module charges the
compute time of a microbatch, multiplied by the number of microbatches that wait there. The peer *reports*
both, because it alone can measure them under concurrency. The network is not charged. Two limits bound the
microbatches in flight to a peer: *slots*, which the peer reports, and *earned*, which grows with its answers.

All inputs are local: what was sent, what came back, and three numbers that each peer reports about itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from swarmnet.backoff import doubled
from swarmnet.identifiers import MicrobatchId, PeerId

SMOOTHING = 0.2
"""Weight of a new measurement. SWARM's 0.1 needs 20 microbatches to notice that a peer slowed down."""
TIE = 0.1
"""Clocks that differ by less than this share of a charge are equal, and chance decides between them. Senders
that started together would otherwise keep choosing the same peer at the same time."""
OVERDUE = 0.4
"""Share of a missed deadline that becomes the new estimate of the answer time. The next deadline is
`timeouts.DEADLINE_FACTOR` (5) times the estimate, which is twice the missed one."""
CATCH_UP = 4.0
"""Maximum number of microbatches that a peer gets at once after it was left out for a while."""
FIRST_SLOTS = 1
"""Microbatches in flight to a peer that has reported nothing. One is enough to get its report, and many
senders meet a slow peer at the same time."""
MAX_SLOTS = 1024
FIRST_BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 10.0
"""More frequent retries are useless after a partition, because libp2p's own dial back-off grows longer."""
FIRST_SHUN_SECONDS, LONGEST_SHUN_SECONDS = 60.0, 3600.0
"""The pause lasts about a hundred rounds; a few microbatches are enough to detect an outlier again."""
BUSY_SECONDS, LONGEST_BUSY_SECONDS = 0.1, 2.0
"""A full peer has room again after about one microbatch. Every further refusal in a row doubles the pause,
because each refusal costs the upload of a body."""


@dataclass(slots=True)
class Estimate:
    """What a sender knows about one peer of the next stage."""

    compute_seconds: float | None = None
    """Seconds of compute for one microbatch, forward and backward; None until the peer has reported it."""
    waiting: float = 0.0
    """Smoothed number of microbatches that wait for the peer's compute, as it reports."""
    answer_seconds: float | None = None
    """Smoothed time from sending to the answer. It includes network, queues and all stages below."""
    clock: float = 0.0
    """Virtual time at which the peer would have finished all that it was sent."""
    heard: bool = False
    """Whether the peer has ever reported anything."""
    in_flight: int = 0
    slots: int = FIRST_SLOTS
    """Number of microbatches that it accepts from this sender at a time (CREDIT)."""
    earned: float = FIRST_SLOTS
    """Number of microbatches that the sender entrusts to it at a time (slow start, Jacobson 1988). It grows
    by one for each answer while at least half is used, and halves after a failure. `slots` is only a claim,
    and a microbatch that is swallowed costs a deadline."""
    peak: int = 0
    """Maximum in flight since the peer's last answer."""
    failures: int = 0
    refusals: int = 0
    """Number of BUSY replies in a row."""
    shuns: int = 0
    """Number of times that the peer's values were found to be outliers, or to differ from others'."""
    failed_until: float = 0.0
    busy_until: float = 0.0
    shunned_until: float = 0.0

    @property
    def blocked_until(self) -> float:
        """End of the longest pause. A short pause does not end a longer one."""
        return max(self.failed_until, self.busy_until, self.shunned_until)

    def has_room(self, now: float) -> bool:
        """Return whether one more microbatch may be sent to this peer now."""
        return self.in_flight < min(self.slots, self.earned) and self.blocked_until <= now

    def has_earned(self, promised: int, now: float) -> bool:
        """Return whether one more may be promised, in addition to those in flight and `promised`."""
        return self.in_flight + promised < self.earned and self.blocked_until <= now


class Router:
    """Keep estimates for the peers of one next stage and choose among them."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.peers: dict[PeerId, Estimate] = {}
        self.clock = 0.0
        """Virtual time: the latest clock among the peers that were sent something."""

    def choose(
        self, candidates: Iterable[PeerId], now: float, avoid: Collection[PeerId] = ()
    ) -> PeerId | None:
        """Return the peer whose virtual clock would be the earliest after one more microbatch. Returns None
        if no peer has room. Chance decides between clocks that differ by less than `TIE`. A peer in `avoid`
        is chosen only if no other peer has room."""
        estimates = [(peer, self._estimate(peer)) for peer in candidates]
        with_room = [(peer, estimate) for peer, estimate in estimates if estimate.has_room(now)]
        if avoid:
            with_room = [(peer, estimate) for peer, estimate in with_room if peer not in avoid] or with_room
        if not with_room:
            return None
        default_seconds = self._default_compute_seconds()
        best, earliest = None, float("inf")
        lower_bounds = []  # A clock ties with the earliest if, less `TIE` of a charge, it is no later.
        for peer, estimate in with_room:
            cost = self._cost(estimate, default_seconds)
            done = estimate.clock + cost
            lower_bounds.append((done - TIE * cost, peer))
            if done < earliest:
                best, earliest = peer, done
        tied = [peer for lower_bound, peer in lower_bounds if lower_bound <= earliest]
        return self.chance.choice(tied) if len(tied) > 1 else best

    def has_room(self, candidates: Iterable[PeerId], now: float) -> bool:
        """Return whether some candidate would take one more microbatch; a peer never used before would."""
        for peer in candidates:
            estimate = self.peers.get(peer)
            if estimate is None or estimate.has_room(now):
                return True
        return False

    def room_at(self, candidates: Iterable[PeerId], now: float) -> float:
        """Return when some candidate has room again because its pause ends. Candidates that already have all
        microbatches that they accept do not count. Returns infinity if there is no such candidate."""
        pause_ends = []
        for peer in candidates:
            estimate = self.peers.get(peer)
            if estimate is None or estimate.blocked_until <= now:
                continue
            if estimate.in_flight < min(estimate.slots, estimate.earned):
                pause_ends.append(estimate.blocked_until)
        return min(pause_ends, default=float("inf"))

    def is_usable(self, peer: PeerId, now: float) -> bool:
        """Return whether the peer is in no pause after a failure, a refusal or an outlier."""
        estimate = self.peers.get(peer)
        return estimate is None or estimate.blocked_until <= now

    def has_earned(self, peer: PeerId, promised: int, now: float) -> bool:
        """Return whether one more microbatch may be promised to the peer, in addition to those in flight and
        `promised` others. Only `earned` limits them here: where places are reserved ahead
        (`peers/worker/pipeline/reservation_client.py`), the reservations replace `slots`."""
        estimate = self.peers.get(peer)
        return promised < FIRST_SLOTS if estimate is None else estimate.has_earned(promised, now)

    def sent(self, peer: PeerId) -> None:
        """Record that a microbatch was sent to `peer`, and advance its clock by the cost. A clock that lags
        by more than `CATCH_UP` microbatches is first moved up, so that the peer is not flooded."""
        estimate = self._estimate(peer)
        estimate.in_flight += 1
        estimate.peak = max(estimate.peak, estimate.in_flight)
        cost = self._cost(estimate, self._default_compute_seconds())
        self.clock = max(self.clock, estimate.clock)
        estimate.clock = max(estimate.clock, self.clock - CATCH_UP * cost) + cost

    def answered(self, peer: PeerId, answer_seconds: float) -> None:
        """Record that an answer came `answer_seconds` after the microbatch was sent. It updates the smoothed
        time, ends the series of failures, and may raise `earned` by one (slow start)."""
        estimate = self._estimate(peer)
        known = estimate.answer_seconds
        estimate.answer_seconds = (
            answer_seconds if known is None else known + SMOOTHING * (answer_seconds - known)
        )
        estimate.failures = estimate.refusals = 0
        if 2 * estimate.peak >= estimate.earned:  # At least half of `earned` was in flight at once.
            estimate.earned = min(MAX_SLOTS, estimate.earned + 1)
        estimate.peak = estimate.in_flight

    def on_credit(self, peer: PeerId, slots: int, compute_seconds: float, waiting: int) -> None:
        """Record what a peer reports in a CREDIT message. Ignored for a peer that was never sent anything.
        `slots` is how many microbatches it accepts from this sender at a time. `waiting` is how many work
        items wait for compute, and `compute_seconds` is its time per microbatch (0: not measured)."""
        estimate = self.peers.get(peer)
        if estimate is None:
            return
        estimate.slots = max(0, min(slots, MAX_SLOTS))
        weight = SMOOTHING if estimate.heard else 1.0  # The first report counts fully.
        estimate.waiting += weight * (min(waiting, MAX_SLOTS) - estimate.waiting)
        estimate.heard = True
        if compute_seconds > 0:
            estimate.compute_seconds = compute_seconds

    def overdue(self, peer: PeerId, waited: float) -> None:
        """Record that no answer came within `waited` seconds. The peer may only be slow, so its expected
        answer time is raised; the next deadline is a multiple of it."""
        estimate = self._estimate(peer)
        estimate.answer_seconds = max(estimate.answer_seconds or 0.0, OVERDUE * waited)

    def expected_seconds(self, peer: PeerId) -> float | None:
        """Return the expected seconds until an answer from `peer`; None if nothing was measured."""
        return self._estimate(peer).answer_seconds

    def ended(self, peer: PeerId) -> None:
        """Record that one microbatch less is in flight to `peer`, however it ended."""
        estimate = self.peers.get(peer)
        if estimate is not None and estimate.in_flight > 0:
            estimate.in_flight -= 1

    def failed(self, peer: PeerId, now: float) -> None:
        """Pause sends to a peer that refused, was lost or missed a deadline, and halve `earned`. The pause
        doubles each time. A further failure during the pause is ignored."""
        estimate = self._estimate(peer)
        if estimate.failed_until > now:
            return  # One failure counts once, however many microbatches it affects.
        estimate.earned = max(FIRST_SLOTS, estimate.earned / 2)
        pause = doubled(FIRST_BACK_OFF_SECONDS, estimate.failures, LONGEST_BACK_OFF_SECONDS)
        estimate.failed_until = now + pause * self.chance.uniform(0.8, 1.2)
        estimate.failures += 1

    def shun(self, peer: PeerId, now: float) -> float:
        """Pause sends for long to a peer whose values are outliers or differ from those of others, in either
        direction of the pipeline. Each further occurrence doubles the pause. Returns its seconds."""
        estimate = self._estimate(peer)
        seconds = doubled(FIRST_SHUN_SECONDS, estimate.shuns, LONGEST_SHUN_SECONDS)
        estimate.shunned_until = now + seconds
        estimate.shuns += 1
        return seconds

    def forgive(self, peer: PeerId) -> None:
        """Halve the number of pauses by which the next one is longer: the peer's values agree again."""
        self._estimate(peer).shuns //= 2

    def shunned(self, now: float) -> dict[PeerId, float]:
        """Return the peers in such a pause, with the seconds until it ends."""
        return {peer: one.shunned_until - now for peer, one in self.peers.items() if one.shunned_until > now}

    def is_shunned(self, peer: PeerId, now: float) -> bool:
        estimate = self.peers.get(peer)
        return estimate is not None and estimate.shunned_until > now

    def busy(self, peer: PeerId, now: float) -> None:
        """Pause sends for a short time to a peer that is full. Each refusal in a row doubles the pause."""
        estimate = self._estimate(peer)
        estimate.busy_until = now + doubled(BUSY_SECONDS, estimate.refusals, LONGEST_BUSY_SECONDS)
        estimate.refusals += 1

    def forget_others(self, known: Collection[PeerId], now: float) -> None:
        """Drop peers that are not in `known`, have nothing in flight and are in no pause."""
        gone = [
            peer
            for peer, estimate in self.peers.items()
            if peer not in known and not estimate.in_flight and estimate.blocked_until <= now
        ]
        for peer in gone:
            del self.peers[peer]

    def _estimate(self, peer: PeerId) -> Estimate:
        """Return the estimate of `peer`. A new peer starts at the present virtual time: it is next."""
        estimate = self.peers.get(peer)
        if estimate is None:
            estimate = Estimate(clock=self.clock)
            self.peers[peer] = estimate
        return estimate

    def _cost(self, estimate: Estimate, default_seconds: float) -> float:
        """Return the virtual seconds by which one microbatch advances the clock of this peer.
        `default_seconds` is its compute time if it has reported none."""
        seconds = default_seconds if estimate.compute_seconds is None else estimate.compute_seconds
        return seconds * (1.0 + estimate.waiting)

    def _default_compute_seconds(self) -> float:
        """Return the compute seconds to assume for a peer that has not reported any: those of the fastest."""
        known = [e.compute_seconds for e in self.peers.values() if e.compute_seconds is not None]
        return min(known, default=1.0)


class Guide(Protocol):
    """Reserves the path of a microbatch before its body is sent (peers/worker/pipeline/
    reservation_client.py). Without a guide, the router chooses the next peer when the output is ready."""

    def choose(
        self, key: MicrobatchId, candidates: Collection[PeerId], now: float, avoid: Collection[PeerId]
    ) -> PeerId | None:
        """Return the next peer of a microbatch; None if there is no reservation yet."""

    def has_room(self, candidates: Collection[PeerId], now: float) -> bool:
        """Return whether an origin may start one more microbatch."""

    def expects(self, key: MicrobatchId, sender: PeerId) -> bool:
        """Return whether `sender` has reserved a place here, so that the microbatch may wait for memory."""
