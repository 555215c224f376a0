"""What watches a peer from inside: faults that nobody awaits end it with a reason, a hang ends it too.

A peer that cannot go on says why and leaves with code 1; what restarts it (systemd, a person) finds its last
checkpoint. Where no restart would help, as with a ban, the code is 2. It never stays as a process that does
nothing.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from peers.errors import DevicesLost, UserError

FAULT = 1
"""Exit code when something other than the user ended the peer."""
LOOK_SECONDS = 1.0
HANG_LOOKS = 60
"""An event loop that has not turned between so many looks hangs. Looks, not seconds: a process that was
stopped and goes on has missed looks as well. A swapping machine was seen to stand still for 20 s."""
WORK_SECONDS = 900.0
"""No single piece of compute (a forward, a round) takes so long on a machine that is of use to a swarm."""

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")


class Fault(Exception):
    """Why the peer cannot go on; one line for people, and a code of peers/telemetry/reasons.py."""

    def __init__(self, why: str, code: str = "fault") -> None:
        super().__init__(why)
        self.code = code


def is_memory(error: BaseException) -> bool:
    """Whether the machine had no memory left. torch has no type for this on the CPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY)


def reason(error: BaseException) -> str:
    """One line for people."""
    text = " ".join(str(error).split())[:300]
    if is_memory(error):
        advice = "give this peer more memory, or fewer `slots` and `in_flight` in its peer file"
        return f"out of memory ({text or type(error).__name__}): {advice}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def unless_failed(work: Coroutine[Any, Any, None], failed: asyncio.Future[BaseException]) -> None:
    """Do `work`; Fault as soon as `failed` has an exception, whatever the work waits for just then.

    A UserError is no fault and is raised as it is: to start again would help nobody (a ban, for one).
    DevicesLost is none either: it helps to begin anew within this process.
    """
    task = asyncio.ensure_future(work)
    try:
        waits: set[asyncio.Future[Any]] = {task, failed}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            error = failed.result()
            if isinstance(error, UserError | DevicesLost):
                raise error
            raise Fault(reason(error), "out_of_memory" if is_memory(error) else "fault")
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_one_ends(**works: Coroutine[Any, Any, object]) -> None:
    """Do all at once, each as a task of its name, until one has ended or this is cancelled; then the others
    are cancelled and waited for. Raises what that one raised."""
    tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def hear_loop(loop: asyncio.AbstractEventLoop, failed: asyncio.Future[BaseException]) -> None:
    """What escapes from callbacks and tasks is logged, as always; without memory the peer cannot go on."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException) and is_memory(error) and not failed.done():
            failed.set_result(error)
            return
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class Watchdog:
    """A thread that ends the process when nothing else can: the event loop hangs, or the compute thread."""

    def __init__(
        self,
        turns: Callable[[], int],
        working_seconds: Callable[[], float],
        say: Callable[[str], None],
        end: Callable[[int], None] = os._exit,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """`turns` grows while the event loop turns; `working_seconds`: for how long the compute thread has
        been at one piece of work."""
        self.turns, self.working_seconds, self.say, self.end = turns, working_seconds, say, end
        self.look_seconds = look_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        seen, still = -1, 0
        while not self._stopped.wait(self.look_seconds):
            turns = self.turns()
            still = still + 1 if turns == seen else 0
            seen = turns
            if still >= HANG_LOOKS:
                self._hangs(f"the event loop has not turned for {still * self.look_seconds:.0f} s")
                return
            if self.working_seconds() > WORK_SECONDS:
                self._hangs(f"one piece of compute takes more than {WORK_SECONDS:g} s")
                return

    def _hangs(self, what: str) -> None:
        self.say(f"{what}: ends; the stacks of all threads follow")
        faulthandler.dump_traceback(sys.stderr)
        self.end(FAULT)


Result = TypeVar("Result")


class Left(Exception):
    """The peer was told to leave before the work was done, which was ended. Not an error."""


async def until_left(leaving: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives or raises; Left when the peer is to leave before that."""
    given: list[Result] = []

    async def wait() -> None:
        given.append(await work)

    await until_one_ends(work=wait(), leaving=leaving.wait())
    if not given:
        raise Left
    return given[0]
