"""What a method asks of the other devices, where several hold a stage together; and of itself, where it is
alone.

All devices ask the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.computing.shares import Shares
from swarmnet.model.flat_layout import Entry


class Company(Protocol):
    """Of one device."""

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all devices, elementwise."""

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """Of a parameter, of which `entry` is what this device has."""

    def whole(self, entry: Entry, part: Tensor) -> Tensor:
        """All of it, from what each has."""

    def part(self, entry: Entry, whole: Tensor) -> Tensor:
        """The other way: what this device has."""


class Alone:
    """One device that has all."""

    def total(self, numbers: Tensor) -> Tensor:
        return numbers

    def shape(self, entry: Entry) -> tuple[int, ...]:
        return entry.shape

    def whole(self, entry: Entry, part: Tensor) -> Tensor:
        return part

    def part(self, entry: Entry, whole: Tensor) -> Tensor:
        return whole


ALONE = Alone()


@dataclass(frozen=True)
class Together:
    """One of several devices."""

    shares: Shares
    device: int
    sum: Callable[[Tensor], Tensor]
    """Over all of them; it may write into what it is given."""
    _places: dict[str, tuple[tuple[int, ...], slice]] = field(default_factory=dict, init=False)
    """Of each parameter its shape, and the part of it that is here."""

    def __post_init__(self) -> None:
        runs = [run for run in self.shares.runs() if run.device == self.device]
        for entry in self.shares.whole.entries:
            place = slice(0, 0)
            for run in runs:
                start, stop = max(run.start, entry.offset), min(run.stop, entry.place.stop)
                if start < stop:
                    place = slice(start - entry.offset, stop - entry.offset)
            self._places[entry.name] = entry.shape, place

    def total(self, numbers: Tensor) -> Tensor:
        return self.sum(numbers.clone())

    def shape(self, entry: Entry) -> tuple[int, ...]:
        return self._places[entry.name][0]

    def whole(self, entry: Entry, part: Tensor) -> Tensor:
        """Numbers of others plus zero: exactly what they have."""
        shape, place = self._places[entry.name]
        whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
        whole.view(-1)[place] = part
        return self.sum(whole)

    def part(self, entry: Entry, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[self._places[entry.name][1]]
