"""Compute when a peer can take one more microbatch, from the bookings of its memory and its processor.

A microbatch holds memory on a peer from its forward pass until its backward pass. At most `memory` of them
fit at a time (TC1 of SkipPipe). It holds the processor during both passes, one microbatch at a time (TC2). A
peer books the microbatches that other peers requested and sends this list to its neighbours. The neighbours
compute from the list when a microbatch could start there.

All times are seconds on one clock. On the wire they are durations from now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OVERDUE_SECONDS = 0.1
"""A booking whose end has passed still holds its memory. Its end is assumed to be now plus this value."""


@dataclass(frozen=True, slots=True)
class Booking:
    start: float
    """Time at which the forward pass begins."""
    release: float
    """Time at which the backward pass ends."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a peer reports about itself."""

    memory: int
    """Number of microbatches that fit at a time. It is 1 on the last stage, which combines both passes."""
    forward_seconds: float
    backward_seconds: float
    bookings: tuple[Booking, ...] = ()

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def has_room(self) -> bool:
        """Return whether some memory is neither in use nor booked."""
        return len(self.bookings) < self.memory


def that_counts(load: Load, most: int) -> Load:
    """Return `load` with at most `most` bookings, without the last ones to end and without their memory."""
    if len(load.bookings) <= most:
        return load
    first = sorted(load.bookings, key=lambda booking: booking.release)[:most]
    memory = max(1, load.memory - (len(load.bookings) - most))
    return Load(memory, load.forward_seconds, load.backward_seconds, tuple(first))


def earliest_start(load: Load, arrival: float, seconds: float, now: float) -> float:
    """Return when a microbatch that arrives at `arrival` and holds memory for `seconds` could begin."""
    held = [Booking(b.start, max(b.release, now + OVERDUE_SECONDS)) for b in load.bookings]
    moments = sorted({arrival, *(b.release for b in held if b.release > arrival)})
    start = next(m for m in moments if _fits(held, load.memory, m, m + seconds))
    if load.memory == 1:
        return start
    return _first_gap(_busy(held, load), start, load.forward_seconds)


def _fits(held: list[Booking], memory: int, start: float, stop: float) -> bool:
    """Return whether fewer than `memory` bookings overlap at every moment of [start, stop)."""
    rises = [start, *(b.start for b in held if start < b.start < stop)]
    return all(sum(b.start <= moment < b.release for b in held) < memory for moment in rises)


def _busy(held: list[Booking], load: Load) -> list[tuple[float, float]]:
    """Return the (start, end) intervals in which the processor is taken, sorted by start."""
    forward = [(b.start, b.start + load.forward_seconds) for b in held]
    return sorted(forward + [(b.release - load.backward_seconds, b.release) for b in held])


def _first_gap(busy: Iterable[tuple[float, float]], start: float, seconds: float) -> float:
    """Return the earliest time from `start` on at which the processor is free for `seconds`."""
    for begin, end in busy:
        if begin >= start + seconds:
            break
        start = max(start, end)
    return start
