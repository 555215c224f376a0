"""Check whether a peer is alive: its event loop turns, and its compute thread has not ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_SECONDS = 1.0
STUCK_SECONDS = 15.0
"""An event loop that has not turned for this many seconds hangs. It is long: swapping machines are slow."""


class Pulse:
    """Tracks the event loop and the compute thread. Called from other threads (/healthz)."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, late: Callable[[float], None] = lambda _: None
    ) -> None:
        """Create the check. `late` is called once a second with the event loop's delay in seconds."""
        self._clock = clock
        self._late = late
        self._turned_at = clock()
        self.turns = 0
        """A counter that grows while the event loop turns."""
        self.fault: Callable[[], BaseException | None] = lambda: None
        """Returns the error that ended the compute thread, or None."""

    async def run(self) -> None:
        while True:
            self._turned_at = self._clock()
            self.turns += 1
            await asyncio.sleep(TURN_SECONDS)
            self._late(max(0.0, self._clock() - self._turned_at - TURN_SECONDS))

    def problem(self) -> str | None:
        """Return why this peer is not alive, in one line: computing ended, or the event loop hangs. None if
        it is."""
        error = self.fault()
        if error is not None:
            return f"computing ended: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        seconds = self._clock() - self._turned_at
        return f"the event loop has not turned for {seconds:.0f} s" if seconds > STUCK_SECONDS else None
