"""How far a run is: its planned rounds, and the time left at the present pace.

The owner's order to end the run names its last round. Without one, the plan is the schedule of the learning
rate: `sync.decay_rounds`, after which the rate stays constant. Times are seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swarmnet.run.schema import Sync

MEASURED_SECONDS = 600.0
"""The pace is measured over this time; the number of peers changes within hours."""
MIN_SECONDS = 20.0
"""Minimum time over which a pace is measured; peers sign the round in their records every 30 s."""


def planned_rounds(sync: Sync, last_round: int | None) -> int:
    """Return the number of rounds that the run is planned to have. `last_round` is the last one by the
    owner's order; None if no end is ordered."""
    return sync.decay_rounds if last_round is None else last_round + 1


@dataclass(slots=True)
class RoundPace:
    """Measures how fast a run's rounds follow each other."""

    _points: deque[tuple[float, int]] = field(default_factory=deque)
    """Pairs of the time at which the round changed, and the round; oldest first."""

    def add(self, now: float, round: int | None) -> None:
        """Record the current round; None if it is not known. A round that is lower than before (another
        history, another stage) starts the measurement anew."""
        if round is None:
            return
        if self._points and round < self._points[-1][1]:
            self._points.clear()
        if not self._points or round > self._points[-1][1]:
            self._points.append((now, round))
        while len(self._points) > 2 and self._points[1][0] < now - MEASURED_SECONDS:
            self._points.popleft()

    def seconds_per_round(self, now: float) -> float | None:
        """Return the present pace; None if it is not known."""
        if not self._points:
            return None
        (first_at, first), (_, newest) = self._points[0], self._points[-1]
        elapsed = now - first_at
        return elapsed / (newest - first) if newest > first and elapsed >= MIN_SECONDS else None

    def seconds_since_change(self, now: float) -> float:
        """Return how long the round has been the same; 0 if none is known."""
        return now - self._points[-1][0] if self._points else 0.0

    def seconds_left(self, now: float, planned: int) -> float | None:
        """Return the time until `planned` rounds are done; None if it is not known, or if they are done."""
        pace = self.seconds_per_round(now)
        if pace is None or self._points[-1][1] >= planned:
            return None
        return (planned - self._points[-1][1]) * pace


def progress_text(round: int, planned: int, seconds_left: float | None) -> str:
    """Return for people: `round 594 of 3,000 (20 %), about 4 min left at this pace`."""
    if round >= planned:
        return f"round {round:,}, after the planned {planned:,}"
    text = f"round {round:,} of {planned:,} ({percent(round / planned)})"
    return text + (
        f", about {duration_text(seconds_left)} left at this pace" if seconds_left is not None else ""
    )


def percent(share: float) -> str:
    """Return a share (0 to 1) for people, with a digit after the point below a tenth: `1.2 %`, `20 %`."""
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


def duration_text(seconds: float) -> str:
    """Return a duration for people: `40 s`, `12 min`, `3 h 5 min`, `2 d 4 h`."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes % 60} min"
