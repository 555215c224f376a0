"""A virtual clock on which single peers can stand still.

Every callback belongs to the peer in whose context it was scheduled (asyncio copies the context of whoever
schedules). While a peer's gate is shut its callbacks are put aside; when it opens they run in order, those
that were cancelled meanwhile left out: as a process that was stopped and goes on (SIGSTOP, SIGCONT).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from heapq import heappop, heappush
from typing import Any

from peers.lab.world.virtual_time import Deadlock, VirtualTimeLoop

MAX_AT_ONCE = 200_000
"""Callbacks without time passing. A swarm of 16 needs some thousands; a livelock never ends."""


class Spinning(RuntimeError):
    """Callbacks schedule callbacks and time does not pass."""


class Gate:
    """One peer's time."""

    def __init__(self) -> None:
        self.shut = False
        self._held: list[_Gated] = []

    def hold(self, handle: _Gated) -> None:
        self._held.append(handle)

    def open(self) -> None:
        self.shut = False
        held, self._held = self._held, []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, GatedLoop)
        for handle in held:
            loop.again(handle)


GATE: ContextVar[Gate | None] = ContextVar("gate", default=None)


class _Gated(asyncio.TimerHandle):
    """A callback and whose time it waits for; what is due at once is due now."""

    __slots__ = ("gate",)

    def __init__(
        self, when: float, callback: Callable[..., Any], arguments: tuple[Any, ...], loop: GatedLoop,
        context: Context | None,
    ) -> None:  # fmt: skip
        super().__init__(when, callback, arguments, loop, context)
        self.gate = GATE.get() if context is None else context.get(GATE)


class GatedLoop(VirtualTimeLoop):
    """Runs what is due, instant by instant, in the order in which it was scheduled.

    It has its own queues: asyncio's compare timers in Python, poll sockets, and took a fifth of a world's
    time. Half of a swarm's callbacks are timers."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = 0
        """Scheduled so far."""
        self._now = 0.0
        self._due: deque[_Gated] = deque()
        self._later: list[tuple[float, int, _Gated]] = []
        self._most = MAX_AT_ONCE
        """The value of `callbacks` that is not reached in this instant unless something spins."""

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,  # noqa: ANN401 - as asyncio's own
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._count()
        handle = _Gated(self._now, callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,  # noqa: ANN401 - as asyncio's own
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self._count()
        handle = _Gated(when, callback, args, self, context)
        heappush(self._later, (when, self.callbacks, handle))
        return handle

    def again(self, handle: _Gated) -> None:
        """What was held up is due now."""
        self._count()
        self._due.append(handle)

    def _run_once(self) -> None:
        """What the base class calls until it is stopped: all that is due now, or else the next instant."""
        due, later = self._due, self._later
        while later and (later[0][0] <= self._now or later[0][2].cancelled()):
            due.append(heappop(later)[2])
        if not due:
            if not later:
                raise Deadlock("every task waits and no timer is set")
            self._now = later[0][0]
            self._most = self.callbacks + MAX_AT_ONCE
            return
        for _ in range(len(due)):
            handle = due.popleft()
            if handle.cancelled():
                continue
            if handle.gate is not None and handle.gate.shut:
                handle.gate.hold(handle)
            else:
                handle._run()

    def _count(self) -> None:
        self.callbacks += 1
        if self.callbacks > self._most:
            self._most += MAX_AT_ONCE  # Whoever takes the error may schedule.
            raise Spinning(f"{MAX_AT_ONCE} callbacks at {self._now:g} s")
