"""Derive the deadline for the answer to an ACT from measured answer times. Times are seconds.

ACT sends a microbatch to the next stage. The answer is GRAD, its gradient, after all stages *below* (the
later ones) have computed it.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmnet.identifiers import PeerId
from swarmnet.routing.load_balancer import Router

FIRST_DEADLINE_SECONDS = 20.0
"""Minimum deadline before any measurement. Peers that start together answer their first ACT late."""
SLOW_LINE = 10e6 / 8
"""Bytes per second: 10 Mbit/s, the upload of a usual cable connection. The first deadline must leave time for
bodies on such a link, or nothing would ever be measured (docs/benchmarks/home_lines.md)."""
SHORTEST_DEADLINE_SECONDS = 2.0
"""Minimum for each stage below. A hop must be able to try another peer before the hop above gives up."""
LONGEST_FIRST_SECONDS = 600.0
"""Before any answer, the deadline doubles up to this value, as in TCP (RFC 6298, 5.5). A link that is full of
attempts that were given up too early would otherwise never carry anything else."""
DEADLINE_FACTOR = 5.0
"""Deadline in multiples of the smoothed answer time. Answers scatter by about 2x on a loaded machine."""
SLOWEST_FACTOR, SLOWEST_DECAY = 2.0, 0.98
"""Answers through a slow peer are rare and take ten times the average. The deadline is at least twice the
slowest recent answer, whose weight halves in 35 answers."""
LONGEST_EXPECTED_SECONDS = 30.0
"""Maximum expected answer time of a peer that has not answered and may never do it."""
SMOOTHING = 0.1
"""Weight of a new answer."""


class AnswerTimes:
    """Measured times of the answers to one peer's ACTs."""

    def __init__(self, router: Router, stages_below: int, body_bytes: int = 0) -> None:
        """Create the statistics. `router` estimates the answer time of each peer. `stages_below` is the
        number of later stages, and `body_bytes` the size of the hidden states of a microbatch."""
        self.router = router
        self.stages_below = stages_below
        bodies = 2 * stages_below  # Each body goes down, and its gradient comes back up.
        self.first = max(FIRST_DEADLINE_SECONDS, DEADLINE_FACTOR * bodies * body_bytes / SLOW_LINE)
        """Deadline before any measurement."""
        self._raised_at = 0.0
        """When `first` was last doubled."""
        self.usual: float | None = None
        """Smoothed seconds from sending an ACT to its GRAD; None before the first answer."""
        self.slowest = 0.0
        """Longest recent answer, with decay."""

    def took(self, seconds: float) -> None:
        """Record the seconds that an answer took."""
        self.usual = seconds if self.usual is None else self.usual + SMOOTHING * (seconds - self.usual)
        self.slowest = max(seconds, SLOWEST_DECAY * self.slowest)

    def missed(self, sent_at: float, now: float) -> None:
        """Record a missed deadline of an ACT sent at `sent_at`. ACTs with the same deadline count once."""
        if self.usual is None and sent_at >= self._raised_at:
            self.first = max(self.first, min(2 * self.first, LONGEST_FIRST_SECONDS))
            self._raised_at = now

    def attempt_seconds(self, candidates: Iterable[PeerId]) -> float:
        """Return the seconds that an origin allows for each attempt to send a microbatch. If all candidates
        have become slow, the fastest one decides, because answers that are not awaited are never measured."""
        expected = [self.router.expected_seconds(peer) for peer in candidates]
        fastest = min((seconds or 0.0 for seconds in expected), default=0.0)  # None means not tried yet.
        return max(self.patience(), DEADLINE_FACTOR * min(fastest, LONGEST_EXPECTED_SECONDS))

    def patience(self, peer: PeerId | None = None, given: float = 0.0) -> float:
        """Return the seconds to wait for GRAD from `peer` (None: any) before another peer is tried. They are
        a multiple of the usual answer time, or of the peer's own if it is slower. Before the first answer
        they are at least the share of `given` that falls to the stages below. `given` is how long the peer
        above, which sent the microbatch here, waits for this one."""
        peer_seconds = self.router.expected_seconds(peer) if peer is not None else None
        if self.usual is None:
            share_of_given = given * self.stages_below / (self.stages_below + 1)
            of_slow_peer = DEADLINE_FACTOR * min(peer_seconds or 0.0, LONGEST_EXPECTED_SECONDS)
            return max(self.first, share_of_given, of_slow_peer)
        expected = max(self.usual, peer_seconds or 0.0)
        is_untried = peer is not None and peer_seconds is None
        shortest = FIRST_DEADLINE_SECONDS if is_untried else SHORTEST_DEADLINE_SECONDS * self.stages_below
        return max(shortest, DEADLINE_FACTOR * expected, SLOWEST_FACTOR * self.slowest)
