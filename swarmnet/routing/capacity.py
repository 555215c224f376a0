"""When a peer could take one more microbatch: its memory and its processor as a list of bookings.

A microbatch holds memory on a peer from its forward until its backward (SkipPipe's TC1: at most `memory` of
them at a time) and the processor during both (TC2: one at a time). A peer books those that it was asked for
and tells the list to its neighbours. They work out by it when a microbatch that arrives then would start.

Times in seconds on one clock; peers tell them as durations from now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OVERDUE_SECONDS = 0.1
"""A booking whose end has passed still holds its memory: it is taken to end so much later than now."""


@dataclass(frozen=True, slots=True)
class Booking:
    start: float
    """Its forward begins ..."""
    release: float
    """... and its backward ends."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a peer tells of itself."""

    memory: int
    """Microbatches that it can hold at a time. 1 on the last stage: it does both passes at once."""
    forward_seconds: float
    backward_seconds: float
    bookings: tuple[Booking, ...] = ()

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def has_room(self) -> bool:
        """Whether it has memory that nobody holds or has booked."""
        return len(self.bookings) < self.memory


def that_counts(load: Load, most: int) -> Load:
    """The same in at most so many bookings: those that end last are left out, and the memory they hold."""
    if len(load.bookings) <= most:
        return load
    first = sorted(load.bookings, key=lambda booking: booking.release)[:most]
    memory = max(1, load.memory - (len(load.bookings) - most))
    return Load(memory, load.forward_seconds, load.backward_seconds, tuple(first))


def earliest_start(load: Load, arrival: float, seconds: float, now: float) -> float:
    """When a microbatch that arrives then, and holds memory for `seconds`, could begin its forward."""
    held = [Booking(b.start, max(b.release, now + OVERDUE_SECONDS)) for b in load.bookings]
    moments = sorted({arrival, *(b.release for b in held if b.release > arrival)})
    start = next(m for m in moments if _fits(held, load.memory, m, m + seconds))
    if load.memory == 1:
        return start
    return _first_gap(_busy(held, load), start, load.forward_seconds)


def _fits(held: list[Booking], memory: int, start: float, stop: float) -> bool:
    """Whether fewer than `memory` bookings overlap anywhere in [start, stop)."""
    rises = [start, *(b.start for b in held if start < b.start < stop)]
    return all(sum(b.start <= moment < b.release for b in held) < memory for moment in rises)


def _busy(held: list[Booking], load: Load) -> list[tuple[float, float]]:
    """When the processor is taken, by start."""
    forward = [(b.start, b.start + load.forward_seconds) for b in held]
    return sorted(forward + [(b.release - load.backward_seconds, b.release) for b in held])


def _first_gap(busy: Iterable[tuple[float, float]], start: float, seconds: float) -> float:
    for begin, end in busy:
        if begin >= start + seconds:
            break
        start = max(start, end)
    return start
