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
    """Compute the time lived: the caller's time without the stops. It needs every `now` at which the caller's
    clock was read."""

    def __init__(self, now: float) -> None:
        self.skipped = 0.0
        """Seconds by which the caller's clock is ahead of the time lived."""
        self.stops = 0
        self._read_at = now
        self._lived = now

    def at(self, now: float) -> float:
        """Return the time lived until `now`, a reading of the caller's clock. A long interval since the last
        reading was a stop of the process, and is skipped. The time lived never goes back."""
        since_last_reading = now - self._read_at
        if since_last_reading > STOOD_SECONDS:
            self.skipped += since_last_reading + READING_SECONDS
            self.stops += 1
        self._read_at = now
        self._lived = max(self._lived, now - self.skipped)
        return self._lived

    def when(self, lived: float) -> float:
        """Return the caller's time at which the time lived will be `lived`: `lived` plus the skipped seconds,
        rounded up. A sum slightly too early would make a timer fire early and be set again, forever."""
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
        self._on_stop = stood
        self._handle = self._loop.call_later(PULSE_SECONDS, self._read_clock)
        self._reported = 0.0

    def time(self) -> float:
        return self._lived.at(self._loop.time())

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Schedule a callback as the loop does. After a stop it comes early, so it must check the time."""
        return self._loop.call_at(self._lived.when(when), callback)

    def close(self) -> None:
        self._handle.cancel()

    def _read_clock(self) -> None:
        """Read the clock four times a second, so that a stop is detected; report a new stop's length."""
        self.time()
        self._handle = self._loop.call_later(PULSE_SECONDS, self._read_clock)
        if self._lived.skipped > self._reported:
            newly_skipped = self._lived.skipped - self._reported
            self._reported = self._lived.skipped
            self._on_stop(newly_skipped - READING_SECONDS)
