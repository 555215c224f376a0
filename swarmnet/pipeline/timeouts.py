"""How long to wait for the answer to an ACT, by how long answers took. Times in seconds."""

from __future__ import annotations

from collections.abc import Iterable

from swarmnet.identifiers import PeerId
from swarmnet.routing.load_balancer import Router

FIRST_DEADLINE_SECONDS = 20.0
"""Patience while nothing was measured yet, at least: peers that start together answer their first ACT
late."""
SLOW_LINE = 10e6 / 8
"""Bytes per second: 10 Mbit/s, the upload of a usual cable line. Bodies must have their time on it before
anything is measured, or nothing ever is (docs/benchmarks/home_lines.md)."""
SHORTEST_DEADLINE_SECONDS = 2.0
"""Times the stages below: a hop must be able to give up and try another before the one above gives up."""
LONGEST_FIRST_SECONDS = 600.0
"""Patience while nothing was ever answered doubles up to this, as it does in TCP (RFC 6298, 5.5): a line that
is full of what was given up too early would carry nothing else for ever."""
DEADLINE_FACTOR = 5.0
"""Patience in smoothed answer times. Answers scatter by about 2x on a loaded machine."""
SLOWEST_FACTOR, SLOWEST_DECAY = 2.0, 0.98
"""Answers through a slow peer are rare and take ten times the average: patience is twice the slowest lately,
which is forgotten by half in 35 answers."""
LONGEST_EXPECTED_SECONDS = 30.0
"""Of somebody who has not answered: patience is five times that. It may swallow all it is sent."""
SMOOTHING = 0.1
"""Weight of a new answer."""


class AnswerTimes:
    """Those to one peer's ACTs."""

    def __init__(self, router: Router, stages_below: int, body_bytes: int = 0) -> None:
        """`router` knows how the peers differ. `body_bytes`: what a microbatch takes from stage to stage."""
        self.router = router
        self.stages_below = stages_below
        bodies = 2 * stages_below  # Down, and back up.
        self.first = max(FIRST_DEADLINE_SECONDS, DEADLINE_FACTOR * bodies * body_bytes / SLOW_LINE)
        """Patience while nothing was measured yet."""
        self._raised_at = 0.0
        self.usual: float | None = None
        """Smoothed time from sending an ACT to its GRAD."""
        self.slowest = 0.0
        """The longest of those lately."""

    def took(self, seconds: float) -> None:
        self.usual = seconds if self.usual is None else self.usual + SMOOTHING * (seconds - self.usual)
        self.slowest = max(seconds, SLOWEST_DECAY * self.slowest)

    def missed(self, sent_at: float, now: float) -> None:
        """A deadline passed of what was sent then. Of all that were sent with one patience one counts."""
        if self.usual is None and sent_at >= self._raised_at:
            self.first = max(self.first, min(2 * self.first, LONGEST_FIRST_SECONDS))
            self._raised_at = now

    def of_an_attempt(self, candidates: Iterable[PeerId]) -> float:
        """What an origin gives each of a microbatch's attempts. Where all who may get it have become slow, it
        is they who say how long: answers that are not waited for would never be learnt."""
        known = [self.router.expected_seconds(peer) for peer in candidates]
        fastest = min((seconds or 0.0 for seconds in known), default=0.0)  # None: not tried yet.
        return max(self.patience(), DEADLINE_FACTOR * min(fastest, LONGEST_EXPECTED_SECONDS))

    def patience(self, peer: PeerId | None = None, given: float = 0.0) -> float:
        """How long to wait for GRAD before another peer is tried; a slow peer gets the time it needs.
        `given`: what the one above waits; of that a hop that has measured nothing takes the part of the way
        that is left, for above they may know."""
        slow = self.router.expected_seconds(peer) if peer is not None else None
        if self.usual is None:
            way_left = given * self.stages_below / (self.stages_below + 1)
            return max(self.first, way_left, DEADLINE_FACTOR * min(slow or 0.0, LONGEST_EXPECTED_SECONDS))
        expected = max(self.usual, slow or 0.0)
        unknown = peer is not None and slow is None
        return max(
            FIRST_DEADLINE_SECONDS if unknown else SHORTEST_DEADLINE_SECONDS * self.stages_below,
            DEADLINE_FACTOR * expected,
            SLOWEST_FACTOR * self.slowest,
        )
