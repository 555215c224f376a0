"""One timer for one state machine: fires when the machine's next deadline comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

GRAIN_SECONDS = 0.001
"""Loops fire timers up to a clock tick early; a machine asked too soon would ask again at once."""


class Timer:
    def __init__(self, fire: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False

    def arm(self, when: float) -> None:
        """Fire at `when` (loop time; infinite: never), instead of what was set before."""
        if self._handle is not None:
            if self._handle.when() == when + GRAIN_SECONDS:
                return
            self._handle.cancel()
            self._handle = None
        if when != float("inf") and not self._closed:
            self._handle = self.loop.call_at(when + GRAIN_SECONDS, self._fired)

    def _fired(self) -> None:
        self._handle = None
        self._fire()

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
