"""Share a process's upload limit among its links: each waits here for its turn to send.

`UploadShare` decides who sends next. This module waits for the decision on the event loop's clock.
"""

from __future__ import annotations

import asyncio

from swarmnet.resources.upload_limiter import UploadShare

NO_LIMIT = 1e15
"""Bytes per second that no link has: the limit of a peer without one."""


class Upload:
    """The upload limit of one process in bytes per second; all links of its transports share it."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._loop = asyncio.get_running_loop()
        self._share = UploadShare(bytes_per_second, self._loop.time())
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, bytes_per_second: float) -> None:
        """Change the limit, also for what waits already."""
        self.bytes_per_second = bytes_per_second
        self._share.change_rate(bytes_per_second, self._loop.time())
        self._grant()

    async def turn(self, size: int, priority: int) -> None:
        """Wait until `size` bytes of a message of this priority may be sent. Cancelling ends the request."""
        if self.bytes_per_second >= NO_LIMIT:
            return
        ticket = self._share.ask(size, priority, self._loop.time())
        turn = self._loop.create_future()
        self._waiting[ticket] = turn
        self._grant()
        try:
            await turn
        finally:
            # True only if the task was cancelled: `_grant` removes a ticket whose turn has come.
            is_still_waiting = self._waiting.pop(ticket, None) is not None
            if is_still_waiting:
                self._share.withdraw(ticket)

    def _grant(self) -> None:
        """Wake the waiting links whose turn has come, and set the timer for the next one, if any waits."""
        for ticket in self._share.granted(self._loop.time()):
            turn = self._waiting.pop(ticket, None)
            if turn is not None and not turn.done():
                turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._timer = self._loop.call_at(self._share.next_grant(self._loop.time()), self._grant)
