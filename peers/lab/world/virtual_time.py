"""An event loop whose clock jumps: a swarm's hour takes as long as its work, and always the same way.

Where the ordinary loop would sleep until the next timer, this one sets its clock to it. Nothing may wait for
another thread or a socket: what would wait for ever is reported as a deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

Result = TypeVar("Result")


class Deadlock(RuntimeError):
    """Every task waits, and no timer is set: nothing will ever happen again."""


MANY_TIMERS = 100
"""From so many on asyncio, too, takes the cancelled ones out."""


class _Instant(float):
    """When a timer is due: the queue compares floats, as asyncio's does, but not in Python."""

    __slots__ = ("handle",)
    handle: asyncio.TimerHandle


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only from one timer to the next. What is meant for a thread runs at
    once: nothing may wait for one on a virtual clock.

    It has its own queue of timers, in asyncio's order: comparing handles in Python and asking the operating
    system for sockets that are not there took a fifth of a swarm's time."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[_Instant] = []
        self._cancelled = 0
        """Of `timers`, about."""

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,  # noqa: ANN401 - as asyncio's own
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        instant = _Instant(when)
        instant.handle = handle
        handle._scheduled = True  # type: ignore[attr-defined]
        heappush(self._timers, instant)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle._scheduled:  # type: ignore[attr-defined]
            self._cancelled += 1

    def _run_once(self) -> None:
        """What the base class calls until it is stopped."""
        ready = self._ready  # type: ignore[attr-defined]
        timers = self._timers = self._without_cancelled()
        if not ready and not self._stopping and not self._sockets_told():  # type: ignore[attr-defined]
            if not timers:
                raise Deadlock("every task waits and no timer is set")
            self._now += max(0.0, timers[0] - self._now)
        due = self._now + self._clock_resolution  # type: ignore[attr-defined]
        while timers and timers[0] < due:
            handle = heappop(timers).handle
            handle._scheduled = False  # type: ignore[attr-defined]
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _without_cancelled(self) -> list[_Instant]:
        """The queue, without those at its head that were cancelled; all of them, once they are many."""
        timers = self._timers
        if len(timers) > MANY_TIMERS and 2 * self._cancelled > len(timers):
            timers = [instant for instant in timers if not instant.handle.cancelled()]
            heapify(timers)
            self._cancelled = 0
        while timers and timers[0].handle.cancelled():
            heappop(timers)
            self._cancelled -= 1
        return timers

    def _sockets_told(self) -> bool:
        """Whether a socket, or another thread through the loop's own, has something: it goes first."""
        events = self._selector.select(0)  # type: ignore[attr-defined]
        self._process_events(events)  # type: ignore[attr-defined]
        return bool(events)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # noqa: ANN401
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on a fresh virtual clock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
