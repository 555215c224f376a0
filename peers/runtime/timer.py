"""One timer for one state machine: fires when the machine's next deadline comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

GRAIN_SECONDS = 0.001
"""Loops fire timers up to a clock tick early; a machine asked too soon would ask again at once."""


class HasTime(Protocol):
    """An event loop, or a peer's own clock (lived_clock.py)."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> asyncio.TimerHandle: ...


class Timer:
    def __init__(self, fire: Callable[[], None], clock: HasTime | None = None) -> None:
        """On the event loop's time unless a `clock` is given."""
        self._clock: HasTime = clock or asyncio.get_running_loop()
        self._fire = fire
        self._when = float("inf")
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False

    def arm(self, when: float) -> None:
        """Fire at `when` (infinite: never), instead of what was set before."""
        if self._handle is not None:
            if self._when == when:
                return
            self._handle.cancel()
            self._handle = None
        if when != float("inf") and not self._closed:
            self._when = when
            self._handle = self._clock.call_at(when + GRAIN_SECONDS, self._fired)

    def _fired(self) -> None:
        self._handle = None
        if self._clock.time() < self._when:
            self.arm(self._when)  # The process stood still meanwhile, or the loop was early.
        else:
            self._fire()

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
