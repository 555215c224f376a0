"""Supervise a peer from inside: errors in background tasks, and hangs, end it with a reason.

An event loop *turns* while it runs callbacks. A peer that cannot continue reports why and exits with code 1.
What restarts it (systemd, a person) finds its last checkpoint. If no restart would help, as with a ban, the
code is 2. A peer never remains as a process that does nothing."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from peers.config.errors import DevicesLost, UserError

FAULT = 1
"""Exit code when something other than the user ended the peer."""
LOOK_SECONDS = 1.0
HANG_LOOKS = 60
"""Number of checks without a turn after which the event loop counts as hanging. Checks are counted, not
seconds, because a stopped process misses checks as well. A swapping machine stood still for 20 s."""
WORK_SECONDS = 900.0
"""Maximum duration of one piece of compute (a forward pass, a round) on a machine that is useful to a swarm.
"""

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")


class FatalError(Exception):
    """The peer cannot continue. Has one line for people, and a code of peers/telemetry/reasons.py."""

    def __init__(self, why: str, code: str = "fault") -> None:
        super().__init__(why)
        self.code = code


def is_memory(error: BaseException) -> bool:
    """Return True if the machine ran out of memory. torch has no exception type for this on the CPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY)


def reason(error: BaseException) -> str:
    """Return the error as one line for people, with advice if memory ran out."""
    text = " ".join(str(error).split())[:300]
    if is_memory(error):
        advice = "give this peer more memory, or fewer `slots` and `in_flight` in its peer file"
        return f"out of memory ({text or type(error).__name__}): {advice}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def unless_failed(work: Coroutine[Any, Any, None], failed: asyncio.Future[BaseException]) -> None:
    """Do `work`. As soon as an error is put into `failed`, cancel the work and raise FatalError with its
    reason. Two kinds are raised unchanged. After a UserError (such as a ban), a restart would not help. After
    DevicesLost, the peer can start again within this process."""
    task = asyncio.ensure_future(work)
    try:
        waits: set[asyncio.Future[Any]] = {task, failed}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            error = failed.result()
            if isinstance(error, UserError | DevicesLost):
                raise error
            raise FatalError(reason(error), "out_of_memory" if is_memory(error) else "fault")
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_one_ends(**coroutines: Coroutine[Any, Any, object]) -> None:
    """Run all coroutines as named tasks until one ends or this call is cancelled. The others are then
    cancelled and awaited. Raises the exception of the task that ended."""
    tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def report_memory_errors(loop: asyncio.AbstractEventLoop, failed: asyncio.Future[BaseException]) -> None:
    """Install the loop's exception handler. It logs exceptions of callbacks and tasks as usual. A lack of
    memory is put into `failed` instead, because it is fatal."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException) and is_memory(error) and not failed.done():
            failed.set_result(error)
            return
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


@dataclass(eq=False, kw_only=True)
class Watchdog:
    """A thread that ends the process if the event loop or the compute thread hangs. `turns` grows while the
    event loop turns. `working_seconds` returns for how long the compute thread has worked on one piece."""

    turns: Callable[[], int]
    working_seconds: Callable[[], float]
    notify: Callable[[str], None]
    end: Callable[[int], None] = os._exit
    look_seconds: float = LOOK_SECONDS

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        """Check regularly, until `stop`. End the process if the event loop has not turned for HANG_LOOKS
        checks. End it also if one piece of compute takes longer than WORK_SECONDS."""
        last_turns, unchanged_checks = -1, 0
        while not self._stopped.wait(self.look_seconds):
            turns = self.turns()
            unchanged_checks = unchanged_checks + 1 if turns == last_turns else 0
            last_turns = turns
            if unchanged_checks >= HANG_LOOKS:
                seconds = unchanged_checks * self.look_seconds
                self._report_and_end(f"the event loop has not turned for {seconds:.0f} s")
                return
            if self.working_seconds() > WORK_SECONDS:
                self._report_and_end(f"one piece of compute takes more than {WORK_SECONDS:g} s")
                return

    def _report_and_end(self, what: str) -> None:
        self.notify(f"{what}: ends; the stacks of all threads follow")
        faulthandler.dump_traceback(sys.stderr)
        self.end(FAULT)


Result = TypeVar("Result")


class Left(Exception):
    """The peer was asked to leave before the work was done. This is not an error."""


async def until_left(leaving: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If `leaving` is set before, cancel the work and raise Left."""
    results: list[Result] = []

    async def wait() -> None:
        results.append(await work)

    await until_one_ends(work=wait(), leaving=leaving.wait())
    if not results:
        raise Left
    return results[0]
