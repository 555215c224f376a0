"""A peer's own clock, which excludes the time in which the process did not run.

After a stop (SIGSTOP, a closed lid, a swapping machine), a process finds everything overdue: its neighbours
seem silent, and all timeouts have passed. In fact it did not read their messages, which are still in its
sockets. The clock therefore skips a stop, and pauses a moment longer until the messages are read. Times are
in seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf, nextafter

PULSE_SECONDS = 0.25
"""Maximum interval between readings of the clock while the process runs."""
STOOD_SECONDS = 1.0
"""A longer interval without a reading means that the process was stopped.

Eight peers on two loaded cores never had one (docs/benchmarks/chaos.md). The shortest timeout that declares a
peer dead is four times this."""
READING_SECONDS = 0.5
"""Additional pause in which messages are read that came during the stop."""


class LivedTime:
    """Compute the time lived until `now`, given every `now` at which it was read. Has no side effects
    outside."""

    def __init__(self, now: float) -> None:
        self.skipped = 0.0
        """What the caller's clock is ahead by."""
        self.stops = 0
        self._read_at = self._lived = now

    def at(self, now: float) -> float:
        """Return the time lived until `now`, and detect a stop since the last reading."""
        stood = now - self._read_at
        if stood > STOOD_SECONDS:
            self.skipped += stood + READING_SECONDS
            self.stops += 1
        self._read_at = now
        self._lived = max(self._lived, now - self.skipped)
        return self._lived

    def when(self, lived: float) -> float:
        """Return the caller's time at which `lived` will be reached. It is not just the sum. Rounding could
        put that slightly too early; the called function would find nothing due and be called again
        forever."""
        now = lived + self.skipped
        while now - self.skipped < lived:
            now = nextafter(now, inf)
        return now


class Clock:
    """`time` and `call_at` of an event loop, for decisions that depend on silence or timeouts."""

    def __init__(self, stood: Callable[[float], None] = lambda seconds: None) -> None:
        """Create the clock. `stood` is called after each stop with its length in seconds."""
        self._loop = asyncio.get_running_loop()
        self._lived = LivedTime(self._loop.time())
        self._stood = stood
        self._handle = self._loop.call_later(PULSE_SECONDS, self._pulse)
        self._reported = 0.0

    def time(self) -> float:
        return self._lived.at(self._loop.time())

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Schedule a callback like the loop does. After a stop it comes too early, so it must check the
        time."""
        return self._loop.call_at(self._lived.when(when), callback)

    def close(self) -> None:
        self._handle.cancel()

    def _pulse(self) -> None:
        self.time()
        self._handle = self._loop.call_later(PULSE_SECONDS, self._pulse)
        if self._lived.skipped > self._reported:
            skipped, self._reported = self._lived.skipped - self._reported, self._lived.skipped
            self._stood(skipped - READING_SECONDS)
