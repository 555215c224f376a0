"""Whether a peer is alive: its event loop turns and nothing that computes has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_SECONDS = 1.0
STUCK_SECONDS = 15.0
"""An event loop that has not turned for so long hangs; generous, for a machine that swaps is only slow."""


class Pulse:
    """Whether the event loop turns and the compute thread works; asked from other threads (/healthz)."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, late: Callable[[float], None] = lambda _: None
    ) -> None:
        """`late` is told, once a second, by how many seconds the event loop was late."""
        self._clock, self._late = clock, late
        self._turned_at = clock()
        self.turns = 0
        """Grows while the event loop turns."""
        self.fault: Callable[[], BaseException | None] = lambda: None
        """What ended the compute thread, once there is one."""

    async def run(self) -> None:
        while True:
            self._turned_at = self._clock()
            self.turns += 1
            await asyncio.sleep(TURN_SECONDS)
            self._late(max(0.0, self._clock() - self._turned_at - TURN_SECONDS))

    def problem(self) -> str | None:
        """What is wrong, in one line; None: all is well."""
        fault = self.fault()
        if fault is not None:
            return f"computing ended: {type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
        still = self._clock() - self._turned_at
        return f"the event loop has not turned for {still:.0f} s" if still > STUCK_SECONDS else None
