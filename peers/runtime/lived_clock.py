"""A peer's own clock: it leaves out the time in which the process stood still.

Stopped (SIGSTOP, a closed lid, a machine that swaps) and let go on, a process finds everything overdue: its
neighbours seem silent for as long, and every patience is at its end. Yet it was not there to hear them, and
what they said lies unread in its sockets. So a stop counts as no time at all, and the clock stands a moment
more, until that is read. Times in seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf, nextafter

PULSE_SECONDS = 0.25
"""How often the clock is read at least, while the process runs."""
STOOD_SECONDS = 1.0
"""So long without one reading, and the process stood still. Eight peers on two loaded cores never were
(docs/benchmarks/chaos.md); the shortest patience that tells the living from the dead is four times this."""
READING_SECONDS = 0.5
"""For what came in meanwhile."""


class LivedTime:
    """Pure: the time lived until `now`, given every `now` at which it was asked for."""

    def __init__(self, now: float) -> None:
        self.skipped = 0.0
        """What the caller's clock is ahead by."""
        self.stops = 0
        self._asked = self._lived = now

    def at(self, now: float) -> float:
        stood = now - self._asked
        if stood > STOOD_SECONDS:
            self.skipped += stood + READING_SECONDS
            self.stops += 1
        self._asked = now
        self._lived = max(self._lived, now - self.skipped)
        return self._lived

    def when(self, lived: float) -> float:
        """The caller's time at which `lived` will have been reached: not the sum, which rounding may put a
        little before that, so that who is called finds nothing due and is called again at once, for ever."""
        now = lived + self.skipped
        while now - self.skipped < lived:
            now = nextafter(now, inf)
        return now


class Clock:
    """`time` and `call_at` of an event loop, for what is decided by silence or patience."""

    def __init__(self, stood: Callable[[float], None] = lambda seconds: None) -> None:
        """`stood` is told how long the process stood still, after each time."""
        self._loop = asyncio.get_running_loop()
        self._lived = LivedTime(self._loop.time())
        self._stood = stood
        self._handle = self._loop.call_later(PULSE_SECONDS, self._pulse)
        self._told = 0.0

    def time(self) -> float:
        return self._lived.at(self._loop.time())

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """As the loop's; early if the process stands still meanwhile: whoever is called looks at the time."""
        return self._loop.call_at(self._lived.when(when), callback)

    def close(self) -> None:
        self._handle.cancel()

    def _pulse(self) -> None:
        self.time()
        self._handle = self._loop.call_later(PULSE_SECONDS, self._pulse)
        if self._lived.skipped > self._told:
            skipped, self._told = self._lived.skipped - self._told, self._lived.skipped
            self._stood(skipped - READING_SECONDS)
