"""What lies between two peers of a MemoryNetwork: how one direction is, what is under way on it.

Times in seconds, sizes in bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Carried = TypeVar("Carried")
"""The links of whoever makes ways."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What one direction between two peers is like. Shares are of messages, 0 to 1."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    lost: float = 0.0
    repeated: float = 0.0
    reordered: float = 0.0
    """Posted again a latency (at least a millisecond) later, behind what was posted meanwhile."""
    corrupted: float = 0.0
    """One bit of a piece is flipped; the receiver must refuse it and close the link."""

    @property
    def faulty(self) -> bool:
        return bool(self.lost or self.repeated or self.reordered or self.corrupted)


@dataclass(slots=True)
class Line:
    """What carries one piece at a time: a direction between two peers, or a peer's uplink."""

    bytes_per_second: float = float("inf")
    busy_until: float = 0.0


@dataclass(slots=True, eq=False)
class Way(Generic[Carried]):
    """One direction between two peers."""

    conditions: Conditions
    line: Line = field(default_factory=Line)
    blocked: bool = False
    blocked_count: int = 0
    links: dict[Carried, None] = field(default_factory=dict)
    """Ordered, so that a seed reproduces what happens."""
    held: list[Callable[[], None]] = field(default_factory=list)
    """What arrived while the way was blocked."""


class Timers:
    """The event loop's timers for what no peer does: they do not inherit the context of whoever sent
    something (a simulation keeps there which peer it is that stands still)."""

    def __init__(self) -> None:
        self._context = copy_context()

    def soon(self, what: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_soon(what, *arguments, context=self._context)

    def at(self, when: float, what: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_at(when, what, *arguments, context=self._context)

    def later(self, seconds: float, what: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(seconds, what, *arguments, context=self._context)
