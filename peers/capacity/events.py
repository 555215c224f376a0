"""Discrete events: a clock that jumps from one to the next; equal times keep the order in which they came."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Events:
    """Call back at given times (seconds). Deterministic: nothing but the callers decides what happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._waiting: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, time: float, callback: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Call `callback(*arguments)` at `time`, or now if that has passed."""
        heapq.heappush(self._waiting, (max(time, self.now), next(self._order), callback, arguments))

    def after(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        self.at(self.now + seconds, callback, *arguments)

    def run(self, until: float) -> None:
        """Let everything happen that is due up to `until`; the clock then stands there."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= until:
            self.now, _, callback, arguments = heapq.heappop(waiting)
            self.happened += 1
            callback(*arguments)
        self.now = max(self.now, until)
