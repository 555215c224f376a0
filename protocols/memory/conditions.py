"""Simulated conditions between two peers of a `MemoryNetwork`, and the data in transit in each direction.

Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Carried = TypeVar("Carried")
"""The type of the links that send in a direction."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Properties of one direction between two peers. Probabilities are per message, 0 to 1."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    lost: float = 0.0
    repeated: float = 0.0
    reordered: float = 0.0
    """Probability that a message is sent one latency (at least 1 ms) later, behind later messages."""
    corrupted: float = 0.0
    """Probability that one bit of a piece is flipped. The receiver must refuse it and close the link."""

    @property
    def faulty(self) -> bool:
        return bool(self.lost or self.repeated or self.reordered or self.corrupted)


@dataclass(slots=True)
class SimulatedLink:
    """A channel that carries one piece at a time: a direction between two peers, or a peer's uplink."""

    bytes_per_second: float = float("inf")
    busy_until: float = 0.0


@dataclass(slots=True, eq=False)
class Direction(Generic[Carried]):
    """One direction between two peers: its conditions, and what is in transit in it."""

    conditions: Conditions
    channel: SimulatedLink = field(default_factory=SimulatedLink)
    blocked: bool = False
    blocked_count: int = 0
    """Number of times that it was blocked so far."""
    links: dict[Carried, None] = field(default_factory=dict)
    """The open links. They are ordered, so that a seed reproduces the simulation."""
    held: list[Callable[[], None]] = field(default_factory=list)
    """Deliveries that arrived while the direction was blocked; each is a call that is made later."""


class Timers:
    """Event-loop timers for events of the network itself. Their calls run in the context variables of the
    network, not of the sending peer. A simulation keeps in these variables which peer is frozen."""

    def __init__(self) -> None:
        self._context = copy_context()

    def soon(self, action: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_soon(action, *arguments, context=self._context)

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_at(when, action, *arguments, context=self._context)

    def later(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(seconds, action, *arguments, context=self._context)
