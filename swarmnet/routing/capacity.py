"""Compute when a peer can take one more microbatch, from the bookings of its memory and its processor.

A microbatch holds memory on a peer from its forward pass until its backward pass. At most `memory` of them
fit at a time (TC1 of SkipPipe). It holds the processor during both passes, one microbatch at a time (TC2). A
peer books the microbatches that other peers requested: each booking is the time from the start of the forward
pass to the end of the backward pass. It sends these bookings to its neighbours. From them the neighbours
compute when a microbatch could start there.

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


def truncate_bookings(load: Load, most: int) -> Load:
    """Return `load` with at most `most` bookings: those that end first. The bookings left out still occupy
    memory, so the memory shrinks by their number (to no less than 1)."""
    if len(load.bookings) <= most:
        return load
    first_to_end = sorted(load.bookings, key=lambda booking: booking.release)[:most]
    memory = max(1, load.memory - (len(load.bookings) - most))
    return Load(memory, load.forward_seconds, load.backward_seconds, tuple(first_to_end))


def earliest_start(load: Load, arrival: float, seconds: float, now: float) -> float:
    """Return the earliest time at which a peer with this load could begin the forward pass of a microbatch.
    The microbatch arrives at `arrival` and holds memory for `seconds`. Memory becomes free only when a
    booking ends, so `arrival` and these times are tried. The first gap of the processor after that counts."""
    # A booking whose end has passed still holds its memory.
    bookings = [Booking(b.start, max(b.release, now + OVERDUE_SECONDS)) for b in load.bookings]
    starts = sorted({arrival, *(b.release for b in bookings if b.release > arrival)})
    start = next(time for time in starts if _is_memory_free(bookings, load.memory, time, time + seconds))
    if load.memory == 1:  # No other booking overlaps, so the processor is free too.
        return start
    return _first_gap(_processor_intervals(bookings, load), start, load.forward_seconds)


def _is_memory_free(bookings: list[Booking], memory: int, start: float, stop: float) -> bool:
    """Return whether fewer than `memory` bookings overlap at every moment of [start, stop). Their number
    grows only where a booking starts, so only these moments are checked."""
    moments = [start, *(b.start for b in bookings if start < b.start < stop)]
    return all(sum(b.start <= moment < b.release for b in bookings) < memory for moment in moments)


def _processor_intervals(bookings: list[Booking], load: Load) -> list[tuple[float, float]]:
    """Return the (start, end) intervals in which the processor is taken, sorted by start."""
    forward = [(b.start, b.start + load.forward_seconds) for b in bookings]
    backward = [(b.release - load.backward_seconds, b.release) for b in bookings]
    return sorted(forward + backward)


def _first_gap(busy: Iterable[tuple[float, float]], start: float, seconds: float) -> float:
    """Return the earliest time from `start` on at which the processor is free for `seconds`. `busy` holds
    the (start, end) intervals in which it is not, sorted by start."""
    for begin, end in busy:
        if begin >= start + seconds:
            break
        start = max(start, end)
    return start
