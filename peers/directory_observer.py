"""A directory's counters become metrics once a second, in every role; what grown counters are to metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container, Mapping
from typing import Protocol

from peers.counted_directory import CountedDirectory
from peers.metrics import Metrics
from peers.reasons import REFUSALS

OBSERVE_SECONDS = 1.0


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


class DirectorySeen(Protocol):
    """What is read of a directory (DhtDirectory)."""

    @property
    def clock_offset(self) -> float: ...

    @property
    def known_nodes(self) -> int: ...

    @property
    def refusals(self) -> Counter[str]: ...


class DirectoryObserver:
    """A directory's counters as metrics, for every role."""

    def __init__(self, counted: CountedDirectory, directory: DirectorySeen, metrics: Metrics) -> None:
        self.counted, self.directory, self.network = counted, directory, metrics.network
        self.growth = Growth()

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(OBSERVE_SECONDS)

    def look(self) -> None:
        self.network.clock_offset.set(self.directory.clock_offset)
        self.network.nodes.set(self.directory.known_nodes)
        for (operation, outcome), count in self.counted.ended.items():
            grown = self.growth.of(operation, count, outcome)
            self.network.directory(operation, outcome).inc(grown)
        for code, count in by_code(self.directory.refusals).items():
            self.network.refused(code).inc(self.growth.of("refused", count, code))


def by_code(counted: Mapping[str, int], codes: Container[str] = REFUSALS) -> dict[str, int]:
    """Counts by the codes that have a series, `other` for all the rest: some come from strangers."""
    counts: Counter[str] = Counter()
    for code, count in counted.items():
        counts[code if code in codes else "other"] += count
    return dict(counts)
