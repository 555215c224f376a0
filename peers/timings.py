"""How long things took in one part of a peer (in seconds, or in rounds), kept until somebody reads it: the
parts know no metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

KEPT = 8192
"""An observer reads once a second; without one the oldest are forgotten."""


class Timings:
    """Any thread may add; one reads."""

    def __init__(self) -> None:
        self._taken: deque[tuple[str, float]] = deque(maxlen=KEPT)

    def add(self, what: str, measured: float) -> None:
        """Seconds, unless `what` is measured otherwise."""
        self._taken.append((what, measured))

    def read(self) -> Iterator[tuple[str, float]]:
        """(what, measured) of everything since the last reading."""
        while self._taken:
            yield self._taken.popleft()
