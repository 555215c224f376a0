"""What the parts of a peer count, kept until somebody reads it: the parts know no metrics.

How long things took, in seconds, and by how much counters have grown since they were last looked at.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterator, Mapping

from peers.telemetry.reasons import REFUSALS

KEPT = 8192
"""An observer reads once a second; without one the oldest are forgotten."""


class Timings(deque[tuple[str, float]]):
    """What was measured, and how long it took. Any thread may append; one reads."""

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT)

    def read(self) -> Iterator[tuple[str, float]]:
        """Everything since the last reading."""
        while self:
            yield self.popleft()


OBSERVE_SECONDS = 1.0
"""From one look to the next."""


class Growth:
    """By how much counters have grown since they were last seen; one that shrank has begun again at 0."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], int] = {}

    def of(self, name: str, count: int, label: str = "") -> int:
        before = self._seen.get((name, label), 0)
        self._seen[name, label] = count
        return count - before if count >= before else count

    def forget(self, *names: str) -> None:
        """What counted these is a new one."""
        self._seen = {key: count for key, count in self._seen.items() if key[0] not in names}


def by_code(counted: Mapping[str, int], codes: Container[str] = REFUSALS) -> dict[str, int]:
    """Counts by the codes that have a series, `other` for all the rest: some come from strangers."""
    counts: Counter[str] = Counter()
    for code, count in counted.items():
        counts[code if code in codes else "other"] += count
    return dict(counts)
