"""A timer for a state machine that does no input or output itself: fires at the machine's next deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

GRAIN_SECONDS = 0.001
"""Delay in seconds. Event loops fire up to a clock tick early, and the timer would be armed again."""


class HasTime(Protocol):
    """An event loop, or a peer's own clock (lived_clock.py)."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> asyncio.TimerHandle: ...


class Timer:
    """Calls a function at one moment, which can be changed."""

    def __init__(self, fire: Callable[[], None], clock: HasTime | None = None) -> None:
        """Create the timer. It uses the event loop's time unless a `clock` is given."""
        self._clock: HasTime = clock or asyncio.get_running_loop()
        self._fire = fire
        self._when = float("inf")
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False

    def arm(self, when: float) -> None:
        """Fire at `when` instead of the time set before; infinite means never."""
        if self._handle is not None:
            if self._when == when:
                return
            self._handle.cancel()
            self._handle = None
        if when != float("inf") and not self._closed:
            self._when = when
            self._handle = self._clock.call_at(when + GRAIN_SECONDS, self._on_due)

    def _on_due(self) -> None:
        """Call the function, or wait on if the clock has not reached the moment."""
        self._handle = None
        if self._clock.time() < self._when:
            self.arm(self._when)  # The process was stopped meanwhile, or the loop was early.
        else:
            self._fire()

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
