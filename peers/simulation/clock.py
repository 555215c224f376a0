"""A virtual clock on which single peers can stand still.

Every callback belongs to the peer in whose context it was scheduled (asyncio copies the context of whoever
schedules). While a peer's gate is shut its callbacks are put aside; when it opens they run in order, those
that were cancelled meanwhile left out: as a process that was stopped and goes on (SIGSTOP, SIGCONT).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any

from peers.virtual_time import VirtualTimeLoop

MOST_AT_ONCE = 200_000
"""Callbacks without time passing. A swarm of 16 needs some thousands; a livelock never ends."""


class Spinning(RuntimeError):
    """Callbacks schedule callbacks and time does not pass."""


class Gate:
    """One peer's time."""

    def __init__(self) -> None:
        self.shut = False
        self._held: list[_Callback] = []

    def hold(self, callback: _Callback) -> None:
        self._held.append(callback)

    def open(self) -> None:
        self.shut = False
        held, self._held = self._held, []
        loop = asyncio.get_running_loop()
        for callback in held:
            loop.call_soon(callback.again, context=callback.context)


GATE: ContextVar[Gate | None] = ContextVar("gate", default=None)


class _Callback:
    __slots__ = ("arguments", "callback", "context", "gate", "handle")

    def __init__(
        self, gate: Gate, callback: Callable[..., Any], arguments: tuple[Any, ...], context: Context | None
    ) -> None:
        self.gate, self.callback, self.arguments, self.context = gate, callback, arguments, context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self.gate.shut:
            self.gate.hold(self)
        else:
            self.callback(*self.arguments)

    def again(self) -> None:
        if self.handle is None or not self.handle.cancelled():
            self()


class GatedLoop(VirtualTimeLoop):
    """Also runs what is meant for a thread at once: nothing may wait for one on a virtual clock."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = 0
        """Scheduled so far."""
        self._instant = (0.0, 0)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None  # noqa: ANN401
    ) -> asyncio.Handle:
        self._count()
        gate, context = _gate_of(context)
        if gate is None:
            return super().call_soon(callback, *args, context=context)
        gated = _Callback(gate, callback, args, context)
        gated.handle = super().call_soon(gated, context=context)
        return gated.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None  # noqa: ANN401
    ) -> asyncio.TimerHandle:
        self._count()
        gate, context = _gate_of(context)
        if gate is None:
            return super().call_at(when, callback, *args, context=context)
        gated = _Callback(gate, callback, args, context)
        gated.handle = timer = super().call_at(when, gated, context=context)
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # noqa: ANN401
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(error)
        return future

    def _count(self) -> None:
        self.callbacks += 1
        instant, before = self._instant
        now = self.time()
        if now != instant:
            self._instant = (now, self.callbacks)
        elif self.callbacks > before + MOST_AT_ONCE:
            self._instant = (now, self.callbacks)  # Whoever takes the error may schedule.
            raise Spinning(f"{MOST_AT_ONCE} callbacks at {now:g} s")


def _gate_of(context: Context | None) -> tuple[Gate | None, Context | None]:
    if context is None:
        return GATE.get(), None
    return context.get(GATE), context
