"""An event loop with a virtual clock on which single peers can be stopped.

Every callback belongs to the peer in whose context it was scheduled, because asyncio copies the context of
the scheduling code. While a peer's gate is shut, its callbacks are kept; when it opens they run in order,
except those that were cancelled meanwhile. This is like a process that is stopped and continued (SIGSTOP,
SIGCONT).
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
"""Maximum number of callbacks at one instant. A swarm of 16 needs some thousands; a livelock has no end."""


class Spinning(RuntimeError):
    """Callbacks schedule callbacks while the clock does not advance."""


class Gate:
    """Stops and continues the callbacks of one peer."""

    def __init__(self) -> None:
        self.shut = False
        self._held: list[_Gated] = []

    def hold(self, handle: _Gated) -> None:
        self._held.append(handle)

    def open(self) -> None:
        self.shut = False
        held = self._held
        self._held = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, GatedLoop)
        for handle in held:
            loop.again(handle)


GATE: ContextVar[Gate | None] = ContextVar("gate", default=None)


class _Gated(asyncio.TimerHandle):
    """A callback, and the gate of its peer."""

    __slots__ = ("gate",)

    def __init__(
        self,
        *,
        when: float,
        callback: Callable[..., Any],
        arguments: tuple[Any, ...],
        loop: GatedLoop,
        context: Context | None,
    ) -> None:
        super().__init__(when, callback, arguments, loop, context)
        self.gate = GATE.get() if context is None else context.get(GATE)


class GatedLoop(VirtualTimeLoop):
    """Runs due callbacks, instant by instant, in the order in which they were scheduled.

    It has its own queues: asyncio compares timers in Python and polls sockets, which took a fifth of the time
    of a simulation. Half of a swarm's callbacks are timers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = 0
        """Number of callbacks scheduled so far."""
        self._now = 0.0
        self._due: deque[_Gated] = deque()
        self._later: list[tuple[float, int, _Gated]] = []
        self._most = MAX_AT_ONCE
        """Limit for `callbacks` in this instant; only a livelock exceeds it."""

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,  # noqa: ANN401 - as asyncio's own
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._count()
        handle = _Gated(when=self._now, callback=callback, arguments=args, loop=self, context=context)
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
        handle = _Gated(when=when, callback=callback, arguments=args, loop=self, context=context)
        heappush(self._later, (when, self.callbacks, handle))
        return handle

    def again(self, handle: _Gated) -> None:
        """Schedule a callback that was kept behind a gate; it is due now."""
        self._count()
        self._due.append(handle)

    def _run_once(self) -> None:
        """Run all callbacks that are due now, or else advance the clock to the next timer."""
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
            self._most += MAX_AT_ONCE  # Error handlers may schedule callbacks.
            raise Spinning(f"{MAX_AT_ONCE} callbacks at {self._now:g} s")
