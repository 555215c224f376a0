"""Split a contribution by device, where several devices hold a stage together, and join the parts.

Each device encodes and decodes the part of its own chunks. Joined, the parts equal byte for byte the payload
that one device makes for all chunks.

Shapes: C chunks of a plane, B bits of a chunk in one section of a payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from swarmnet.model.computing.shares import Shares
from swarmnet.model.flat_layout import Plane
from swarmnet.optimizer.device_groups.device_group import DeviceGroup, MultiDevice
from swarmnet.optimizer.index_code import BitArray, pack, packed_bytes, unpack

Sections: TypeAlias = Sequence[tuple[int, ...]]
"""For each plane, how many bits each chunk has in each section of the payload."""


@runtime_checkable
class Divisible(Protocol):
    """A method that works on a device's share of the chunks as it does on all of them."""

    @property
    def sections(self) -> Sections:
        """The sections of its contributions; empty if every device makes and takes whole ones. Every device
        takes whole results of reducers."""

    def use_device_group(self, company: DeviceGroup) -> None:
        """Use only a share; `company` reaches the other devices. Called before all other methods."""


@dataclass(frozen=True, slots=True)
class _Section:
    plane: int
    chunks: int
    bits: int
    start: int
    """First byte in the payload."""

    @property
    def stop(self) -> int:
        return self.start + packed_bytes(self.chunks, self.bits)

    def read(self, payload: bytes) -> BitArray:
        """Return the bits, uint8 [C, B]; for whole bytes, the bytes [C, B / 8]."""
        data = memoryview(payload)[self.start : self.stop]
        if self.bits % 8:
            return unpack(data, self.chunks, self.bits)
        return np.frombuffer(data, np.uint8).reshape(self.chunks, self.bits // 8)

    def written(self, read_CB: BitArray) -> bytes:
        return pack(read_CB) if self.bits % 8 else read_CB.tobytes()


def divided(payload: bytes, sections: Sections, shares: Shares) -> list[bytes]:
    """Split a payload into one part for each device, by the chunks that it has. Without sections, each part
    is the whole payload."""
    if not sections:
        return [payload] * shares.devices
    parts: list[list[bytes]] = [[] for _ in range(shares.devices)]
    for section in _sections(shares.whole.planes, sections):
        read_CB = section.read(payload)
        for device, part in enumerate(parts):
            of_device = [read_CB[rows] for rows in shares.rows(section.plane, device)]
            if of_device:
                part.append(section.written(np.concatenate(of_device)))
    return [b"".join(part) for part in parts]


def put_together(parts: Sequence[bytes], sections: Sections, shares: Shares) -> bytes:
    """Join the parts of all devices into one payload; the inverse of `divided`."""
    if not sections:
        return parts[0]
    rows_of = [
        [shares.rows(plane, device) for plane in range(len(shares.whole.planes))]
        for device in range(shares.devices)
    ]
    theirs = [_of_share(shares.whole.planes, sections, rows) for rows in rows_of]
    joined = []
    for section in _sections(shares.whole.planes, sections):
        width = section.bits if section.bits % 8 else section.bits // 8
        whole_CB = np.empty((section.chunks, width), np.uint8)
        for part, rows, own in zip(parts, rows_of, theirs, strict=True):
            if not rows[section.plane]:
                continue
            at, read_CB = 0, next(own).read(part)
            for chunks in rows[section.plane]:
                until = at + chunks.stop - chunks.start
                whole_CB[chunks] = read_CB[at:until]
                at = until
        joined.append(section.written(whole_CB))
    return b"".join(joined)


def gather(part: bytes, sections: Sections, group: DeviceGroup, device: torch.device) -> bytes:
    """Return the whole payload on every device, from the part that each has made. `device` is this one."""
    if not isinstance(group, MultiDevice):
        return part
    size = sum(section.stop - section.start for section in _sections(group.shares.whole.planes, sections))
    parts = divided(bytes(size), sections, group.shares)
    parts[group.device] = part
    # The parts of the others are zero, and no bit has two devices.
    joined = bytearray(put_together(parts, sections, group.shares))
    return group.total(torch.frombuffer(joined, dtype=torch.uint8).to(device)).cpu().numpy().tobytes()


def own_part(payload: bytes, sections: Sections, group: DeviceGroup) -> bytes:
    """Return the part of a whole payload that this device has."""
    if not isinstance(group, MultiDevice):
        return payload
    return divided(payload, sections, group.shares)[group.device]


def _sections(planes: Sequence[Plane], sections: Sections) -> Iterator[_Section]:
    return _laid([plane.chunks for plane in planes], sections)


def _of_share(
    planes: Sequence[Plane], sections: Sections, rows: Sequence[Sequence[slice]]
) -> Iterator[_Section]:
    """Yield the sections of a device's part, which lacks planes without its chunks."""
    chunks = [sum(each.stop - each.start for each in rows[plane]) for plane in range(len(planes))]
    return (section for section in _laid(chunks, sections) if section.chunks)


def _laid(chunks: Sequence[int], sections: Sections) -> Iterator[_Section]:
    start = 0
    for plane, (count, bits_of) in enumerate(zip(chunks, sections, strict=True)):
        for bits in bits_of:
            yield _Section(plane, count, bits, start)
            start += packed_bytes(count, bits)
