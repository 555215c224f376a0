"""Collective operations among the devices that hold one stage together; trivial on a single device.

All devices make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.computing.shares import PlaneShare, Shares
from swarmnet.model.flat_layout import Entry, Layout


class DeviceGroup(Protocol):
    """The operations of one device."""

    def total(self, numbers: Tensor) -> Tensor:
        """Return the elementwise sum over all devices."""

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """Return the full shape of a parameter, of which `entry` is this device's shard."""

    def place(self, entry: Entry) -> slice:
        """Return the place of this device's shard in the full parameter."""

    def whole(self, entry: Entry, part: Tensor) -> Tensor:
        """Return the full parameter from the shards of all devices."""

    def part(self, entry: Entry, whole: Tensor) -> Tensor:
        """Return this device's shard of a full parameter."""

    def planes(self, share: Layout) -> Sequence[PlaneShare]:
        """Return the planes of the whole stage, of which `share` is this device's part."""

    def divide(self, whole: Layout) -> DeviceGroup:
        """Return the group for a vector of some of the stage's parameters, with a layout of its own."""

    def share(self, whole: Layout) -> Layout:
        """Return this device's share of the vector that the group is for."""


class SingleDevice:
    """A single device that has everything."""

    def total(self, numbers: Tensor) -> Tensor:
        return numbers

    def shape(self, entry: Entry) -> tuple[int, ...]:
        return entry.shape

    def place(self, entry: Entry) -> slice:
        return slice(0, entry.size)

    def whole(self, entry: Entry, part: Tensor) -> Tensor:
        return part

    def part(self, entry: Entry, whole: Tensor) -> Tensor:
        return whole

    def planes(self, share: Layout) -> list[PlaneShare]:
        return [
            PlaneShare(plane, number, (slice(0, plane.chunks),)) for number, plane in enumerate(share.planes)
        ]

    def divide(self, whole: Layout) -> SingleDevice:
        return self

    def share(self, whole: Layout) -> Layout:
        return whole


ALONE = SingleDevice()


@dataclass(frozen=True)
class MultiDevice:
    """One of several devices."""

    shares: Shares
    device: int
    sum: Callable[[Tensor], Tensor]
    """Sums over all devices; it may overwrite its argument."""
    _places: dict[str, tuple[tuple[int, ...], slice]] = field(default_factory=dict, init=False)
    """Maps a parameter to its full shape and the range of it that is on this device."""

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

    def place(self, entry: Entry) -> slice:
        return self._places[entry.name][1]

    def whole(self, entry: Entry, part: Tensor) -> Tensor:
        """Return the sum of the shards with zeros elsewhere, which is exact."""
        shape, place = self._places[entry.name]
        whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
        whole.view(-1)[place] = part
        return self.sum(whole)

    def part(self, entry: Entry, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[self._places[entry.name][1]]

    def planes(self, share: Layout) -> list[PlaneShare]:
        return self.shares.planes(self.device)

    def divide(self, whole: Layout) -> MultiDevice:
        return MultiDevice(Shares(whole, self.shares.devices), self.device, self.sum)

    def share(self, whole: Layout) -> Layout:
        return self.shares.layout(self.device)
