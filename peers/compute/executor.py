"""Where the tensor work of a peer runs: one thread, most urgent first; or inline on a virtual clock.

Work returns a value or is at fault: what may go wrong with a microbatch is caught inside the work itself.
An exception that escapes means this program is wrong; the peer then ends with it (`failed`).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import PriorityQueue
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")

UPDATE, BACKWARD, FORWARD = range(3)
"""Priorities: rounds first, they are short and others wait; backward before forward frees memory."""


def set_threads(threads: int) -> None:
    """Compute threads of this process; one is best where several peers share a machine (docs/lessons.md)."""
    torch.set_num_threads(threads)


class Compute(Protocol):
    """Runs one piece of work at a time; equal priorities in the order of submission."""

    failed: asyncio.Future[BaseException]
    """Gets the exception that escaped from some work: the peer cannot go on."""

    @property
    def queued(self) -> int: ...

    @property
    def busy_seconds(self) -> float:
        """How long it has worked since it began, what runs now included."""

    @property
    def rested_seconds(self) -> float:
        """How long it has rested because it is not to work all the time."""

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        """Run `work`, then call `done(result, seconds of work)` on the event loop."""

    def working_seconds(self) -> float:
        """How long the piece of work that runs has been running; 0 if none does. From any thread."""

    async def close(self) -> None:
        """Finish what runs, drop what waits."""


class ThreadCompute:
    """One thread. `failed` holds the exception that escaped from some work."""

    def __init__(self, share: float = 1.0) -> None:
        """`share` of the time it works at most: after each piece it pauses for the rest."""
        self.pause = 1.0 / share - 1.0
        self.used: Callable[[], float] = time.thread_time
        """Seconds that its work has cost; where others do it, those that it was waited for."""
        self.loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = self.loop.create_future()
        self._queue: PriorityQueue[tuple[int, int, Callable[[], Any], Callable[[Any, float], None]]]
        self._queue = PriorityQueue()
        self._order = itertools.count()
        self._thread = ThreadPoolExecutor(1, "compute")
        self._closed = False
        self._began: float | None = None
        self._worked = 0.0
        self.rested_seconds = 0.0

    @property
    def queued(self) -> int:
        return self._queue.qsize()

    @property
    def busy_seconds(self) -> float:
        return self._worked + self.working_seconds()

    def working_seconds(self) -> float:
        """See `Compute`."""
        began = self._began
        return 0.0 if began is None else time.perf_counter() - began

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        if self._closed:
            return
        self._queue.put((priority, next(self._order), work, done))
        self._thread.submit(self._run_next).add_done_callback(self._ran)

    def _run_next(self) -> None:
        _, _, work, done = self._queue.get_nowait()
        self._began = start = time.perf_counter()
        used = self.used()
        try:
            result = work()
        finally:
            self._worked += time.perf_counter() - start
            self._began = None
        if self.pause:
            rest = self.pause * (self.used() - used)  # Not of what others took of the core.
            time.sleep(rest)
            self.rested_seconds += rest
        self.loop.call_soon_threadsafe(self._deliver, done, result, time.perf_counter() - start)

    def _deliver(self, done: Callable[[Any, float], None], result: object, seconds: float) -> None:
        if not self._closed:
            done(result, seconds)

    def _ran(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)


class InlineCompute:
    """For the simulator: work runs in the event loop and takes `cost(priority)` seconds of its clock."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = self.loop.create_future()
        self.cost = cost
        self._queue: list[tuple[int, int, Callable[[], Any], Callable[[Any, float], None]]] = []
        self._order = itertools.count()
        self._busy = False
        self.busy_seconds = self.rested_seconds = 0.0
        self._closed = False

    @property
    def queued(self) -> int:
        return len(self._queue)

    def working_seconds(self) -> float:
        """See `Compute`: on this clock nothing ever hangs."""
        return 0.0

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        heapq.heappush(self._queue, (priority, next(self._order), work, done))
        if not self._busy:
            self._busy = True
            self.loop.call_soon(self._run_next)

    def _run_next(self) -> None:
        if self._closed or not self._queue:
            self._busy = False
            return
        priority, _, work, done = heapq.heappop(self._queue)
        seconds = self.cost(priority)
        result = work()
        self.loop.call_later(seconds, self._finish, done, result, seconds)

    def _finish(self, done: Callable[[Any, float], None], result: object, seconds: float) -> None:
        self.busy_seconds += seconds
        if not self._closed:
            done(result, seconds)
            self._run_next()

    async def close(self) -> None:
        self._closed = True
