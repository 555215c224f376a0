"""How long to wait for the answer to an ACT, by how long answers took. Times in seconds."""

from __future__ import annotations

from collections.abc import Iterable

from swarmnet.identifiers import PeerId
from swarmnet.routing.load_balancer import Router

FIRST_DEADLINE_SECONDS = 20.0
"""Patience while nothing was measured yet: peers that start together answer their first ACT late."""
SHORTEST_DEADLINE_SECONDS = 2.0
"""Times the stages below: a hop must be able to give up and try another before the one above gives up."""
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

    def __init__(self, router: Router, stages_below: int) -> None:
        """`router` knows how the peers differ."""
        self.router = router
        self.stages_below = stages_below
        self.usual: float | None = None
        """Smoothed time from sending an ACT to its GRAD."""
        self.slowest = 0.0
        """The longest of those lately."""

    def took(self, seconds: float) -> None:
        self.usual = seconds if self.usual is None else self.usual + SMOOTHING * (seconds - self.usual)
        self.slowest = max(seconds, SLOWEST_DECAY * self.slowest)

    def of_an_attempt(self, candidates: Iterable[PeerId]) -> float:
        """What an origin gives each of a microbatch's attempts. Where all who may get it have become slow, it
        is they who say how long: answers that are not waited for would never be learnt."""
        known = [self.router.expected_seconds(peer) for peer in candidates]
        fastest = min((seconds or 0.0 for seconds in known), default=0.0)  # None: not tried yet.
        return max(self.patience(), DEADLINE_FACTOR * min(fastest, LONGEST_EXPECTED_SECONDS))

    def patience(self, peer: PeerId | None = None) -> float:
        """How long to wait for GRAD before another peer is tried; a slow peer gets the time it needs."""
        slow = self.router.expected_seconds(peer) if peer is not None else None
        if self.usual is None or (peer is not None and slow is None):
            return max(FIRST_DEADLINE_SECONDS, DEADLINE_FACTOR * min(slow or 0.0, LONGEST_EXPECTED_SECONDS))
        expected = max(self.usual, slow or 0.0)
        return max(
            SHORTEST_DEADLINE_SECONDS * self.stages_below,
            DEADLINE_FACTOR * expected,
            SLOWEST_FACTOR * self.slowest,
        )
