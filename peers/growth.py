"""Counters as metrics: by how much they have grown since they were last looked at, and under which codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

from peers.reasons import REFUSALS

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
