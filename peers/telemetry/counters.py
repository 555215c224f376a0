"""Counters and timings that a peer's parts keep for the metrics, so that the parts need not know the metrics.

This module has durations in seconds, and the growth of counters since they were last read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterator, Mapping

from peers.telemetry.reasons import REFUSALS

KEPT = 8192
"""Measurements kept if they are not read; the sampler reads once a second."""


class Timings(deque[tuple[str, float]]):
    """Pairs of a name and a duration in seconds. Any thread may append; one thread reads."""

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT)

    def read(self) -> Iterator[tuple[str, float]]:
        """Yield all measurements since the last call."""
        while self:
            yield self.popleft()


OBSERVE_SECONDS = 1.0
"""Interval between two samples."""


class Growth:
    """Growth of counters since they were last read; a counter that shrank has restarted at 0."""

    def __init__(self) -> None:
        self._last_counts: dict[tuple[str, str], int] = {}

    def of(self, name: str, count: int, label: str = "") -> int:
        """Return how much the counter `name`, now at `count`, grew since the last call for it."""
        previous = self._last_counts.get((name, label), 0)
        self._last_counts[name, label] = count
        return count - previous if count >= previous else count

    def forget(self, *names: str) -> None:
        """Treat these counters as new ones that start at 0."""
        self._last_counts = {key: count for key, count in self._last_counts.items() if key[0] not in names}


def by_code(counted: Mapping[str, int], codes: Container[str] = REFUSALS) -> dict[str, int]:
    """Return counts by known code, all others as `other`. Codes may come from untrusted peers, and the number
    of series is bounded."""
    counts: Counter[str] = Counter()
    for code, count in counted.items():
        counts[code if code in codes else "other"] += count
    return dict(counts)
