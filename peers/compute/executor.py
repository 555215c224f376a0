"""Run the tensor work of a peer: in one thread, most urgent first; or inline on a virtual clock.

Errors that a microbatch may cause are caught inside the work itself. An exception that escapes is a bug of
this program, and the peer ends with it (`failed`).
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
"""Priorities. Rounds are first: they are short, and peers wait. Backward before forward frees memory."""


def set_threads(threads: int) -> None:
    """Set the compute threads of this process. One is best if peers share a machine (docs/lessons.md)."""
    torch.set_num_threads(threads)


class Compute(Protocol):
    """Runs one work item at a time; equal priorities run in the order of submission."""

    failed: asyncio.Future[BaseException]
    """Gets the exception that escaped from some work; the peer must end then."""

    @property
    def queued(self) -> int: ...

    @property
    def busy_seconds(self) -> float:
        """Seconds of work since the start, including the current work item."""

    @property
    def rested_seconds(self) -> float:
        """Seconds of rest because the peer may not work all the time."""

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        """Run `work`, then call `done(result, seconds)` on the event loop. The seconds include the pause
        after the work."""

    def work_at_most(self, share: float) -> None:
        """Work at most `share` of the time (above 0, at most 1) from the next work item on."""

    def working_seconds(self) -> float:
        """Return the seconds of the current work item; 0 if there is none. Any thread may call it."""

    async def close(self) -> None:
        """Finish the current work item and drop the others."""


async def computed(compute: Compute, work: Callable[[], Result]) -> Result:
    """Run `work` at the priority of updates, and return its result."""
    done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def deliver(result: Result, _seconds: float) -> None:
        if not done.done():
            done.set_result(result)

    compute.submit(UPDATE, work, deliver)
    return await done


class ThreadCompute:
    """Runs work in one thread. `failed` gets the exception that escaped from some work."""

    def __init__(self, share: float = 1.0) -> None:
        """Start the thread. It works at most `share` of the time and pauses after each work item."""
        self.work_at_most(share)
        self.used: Callable[[], float] = time.thread_time
        """Returns the CPU seconds of the work so far; if other processes do the work, the time of waiting."""
        self.loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = self.loop.create_future()
        self._queue: PriorityQueue[tuple[int, int, Callable[[], Any], Callable[[Any, float], None]]]
        self._queue = PriorityQueue()
        self._order = itertools.count()
        self._thread = ThreadPoolExecutor(1, "compute")
        self._closed = False
        self._started_at: float | None = None
        self._finished_seconds = 0.0
        self.rested_seconds = 0.0

    def work_at_most(self, share: float) -> None:
        self.pause = 1.0 / share - 1.0

    @property
    def queued(self) -> int:
        return self._queue.qsize()

    @property
    def busy_seconds(self) -> float:
        return self._finished_seconds + self.working_seconds()

    def working_seconds(self) -> float:
        started_at = self._started_at
        return 0.0 if started_at is None else time.perf_counter() - started_at

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        if self._closed:
            return
        self._queue.put((priority, next(self._order), work, done))
        self._thread.submit(self._run_next).add_done_callback(self._on_work_ended)

    def _run_next(self) -> None:
        """Run the most urgent work item in the compute thread, and have `done` called on the event loop. In
        between, pause if the thread may not work all the time: `self.pause` seconds for each CPU second of
        the work."""
        _, _, work, done = self._queue.get_nowait()
        self._started_at = time.perf_counter()
        start = self._started_at
        used_before = self.used()
        try:
            result = work()
        finally:
            self._finished_seconds += time.perf_counter() - start
            self._started_at = None
        if self.pause:
            # The CPU time excludes what other threads took of the core.
            pause_seconds = self.pause * (self.used() - used_before)
            time.sleep(pause_seconds)
            self.rested_seconds += pause_seconds
        self.loop.call_soon_threadsafe(self._call_done, done, result, time.perf_counter() - start)

    def _call_done(self, done: Callable[[Any, float], None], result: object, seconds: float) -> None:
        if not self._closed:
            done(result, seconds)

    def _on_work_ended(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._set_failed, error)

    def _set_failed(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)


class InlineCompute:
    """Runs work in the simulator's event loop; it takes `cost(priority)` seconds of the virtual clock."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = self.loop.create_future()
        self.cost = cost
        self._queue: list[tuple[int, int, Callable[[], Any], Callable[[Any, float], None]]] = []
        self._order = itertools.count()
        self._busy = False
        self.busy_seconds = 0.0
        self.rested_seconds = 0.0
        self._share = 1.0
        self._closed = False

    @property
    def queued(self) -> int:
        return len(self._queue)

    def work_at_most(self, share: float) -> None:
        self._share = share

    def working_seconds(self) -> float:
        """Return 0: in the simulator no work item is ever stuck."""
        return 0.0

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        heapq.heappush(self._queue, (priority, next(self._order), work, done))
        if not self._busy:
            self._busy = True
            self.loop.call_soon(self._run_next)

    def _run_next(self) -> None:
        """Run the most urgent work item. `_finish` follows after its virtual cost, and runs the next."""
        if self._closed or not self._queue:
            self._busy = False
            return
        priority, _, work, done = heapq.heappop(self._queue)  # The second part is the submission's number.
        seconds = self.cost(priority) / self._share
        result = work()
        self.loop.call_later(seconds, self._finish, done, result, seconds)

    def _finish(self, done: Callable[[Any, float], None], result: object, seconds: float) -> None:
        self.busy_seconds += seconds
        if not self._closed:
            done(result, seconds)
            self._run_next()

    async def close(self) -> None:
        self._closed = True
