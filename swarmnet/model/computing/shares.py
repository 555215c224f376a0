"""Divide the weights of a stage among several devices, as torch.distributed.fsdp does.

All weights of a stage are one flat vector. Parts of it, the *planes*, are matrices whose rows are *chunks* of
equal length. Each block (such as a layer or the head) has some consecutive rows of a plane, a *piece*. Each
piece is divided among the devices by rows, as FSDP divides a parameter. A device's parts, joined, are its
*share*:

    plane of a stage     piece: layer 0     piece: layer 1
    rows (chunks)        0 1 2 3            4 5 6 7
    device               0 0 1 1            0 0 1 1       -> share of device 0: rows 0 1 4 5
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, groupby

from swarmnet.model.flat_layout import Entry, Layout, Plane


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunks `first` to `first + chunks` of a plane."""

    block: str
    plane: int
    first: int
    chunks: int
    entries: tuple[Entry, ...]
    """Its parameters, with places in the whole flat vector."""

    def rows(self, device: int, devices: int) -> slice:
        """Return the rows of the plane that one of `devices` devices has of this piece; they may be empty."""
        rows_per_device = -(-self.chunks // devices)
        start = self.first + min(device * rows_per_device, self.chunks)
        stop = self.first + min((device + 1) * rows_per_device, self.chunks)
        return slice(start, stop)


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """A contiguous range of the whole flat vector that lies on one device."""

    device: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlaneShare:
    """The chunks of one plane that one device has."""

    whole: Plane
    number: int | None
    """Number of the plane in the device's share; None if the device has no chunk of it."""
    rows: tuple[slice, ...]
    """These chunks in the whole plane, in the order of the share."""

    def within(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Yield those of the chunks `rows` of the whole plane that the device has: their place in `rows`, and
        their place in the device's plane."""
        offset = 0
        for held in self.rows:
            first, stop = max(held.start, rows.start), min(held.stop, rows.stop)
            if first < stop:
                shift = offset - held.start
                yield slice(first - rows.start, stop - rows.start), slice(first + shift, stop + shift)
            offset += held.stop - held.start


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of a stage on `devices` devices. An optimizer works in a share as in a whole stage, because
    chunks are independent."""

    whole: Layout
    devices: int

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in the order of the flat vector."""
        return list(pieces_of(self.whole))

    def rows(self, plane: int, device: int) -> list[slice]:
        """Return the ranges of a plane's chunks that one device has, one for each piece that is not empty."""
        of_pieces = (piece.rows(device, self.devices) for piece in self.pieces if piece.plane == plane)
        return [rows for rows in of_pieces if rows.start < rows.stop]

    def runs(self) -> Iterator[DeviceRange]:
        """Yield the ranges of the flat vector in order, each with the device that has it: one for each piece
        and device, unless it is empty. A device's share consists of its own ranges, one after the other."""
        for piece in self.pieces:
            plane = self.whole.planes[piece.plane]
            for device in range(self.devices):
                rows = piece.rows(device, self.devices)
                if rows.start < rows.stop:
                    start = plane.offset + rows.start * plane.chunk
                    stop = plane.offset + rows.stop * plane.chunk
                    yield DeviceRange(device, start, stop)

    def planes(self, device: int) -> list[PlaneShare]:
        """Return the planes of the stage, each with the chunks that a device has of it."""
        rows_of_planes = [tuple(self.rows(number, device)) for number in range(len(self.whole.planes))]
        number = count()
        return [
            PlaneShare(plane, next(number) if rows else None, rows)
            for plane, rows in zip(self.whole.planes, rows_of_planes, strict=True)
        ]

    def layout(self, device: int) -> Layout:
        """Return the layout of a device's share: the places of parameters, planes and padding in it. It lists
        all parameters of the stage in the same order, because some code identifies them by number. Each is
        a vector of the parameter's values that lie on the device, or empty if none do."""
        placed: list[tuple[DeviceRange, int]] = []  # Each range of the stage, and its offset in the share.
        size = 0
        for device_range in self.runs():
            if device_range.device == device:
                placed.append((device_range, size))
                size += device_range.stop - device_range.start
        entries = tuple(_part_of(entry, placed) for entry in self.whole.entries)
        padding: list[tuple[int, int]] = []
        for device_range, offset in placed:
            shift = offset - device_range.start  # From a place in the stage to its place in the share.
            for padding_start, padding_stop in self.whole.padding:
                start = max(padding_start, device_range.start)
                stop = min(padding_stop, device_range.stop)
                if start < stop:  # The device has a part of this padding.
                    padding.append((start + shift, stop + shift))
        return Layout(entries, tuple(self._planes(device)), tuple(padding), size)

    def _planes(self, device: int) -> Iterator[Plane]:
        """Yield the planes of a device's share: for each plane of the stage, the chunks that it has of it."""
        offset = 0
        for number, plane in enumerate(self.whole.planes):
            chunks = sum(rows.stop - rows.start for rows in self.rows(number, device))
            if chunks:
                yield Plane(offset, chunks, plane.chunk)
            offset += chunks * plane.chunk


def pieces_of(layout: Layout) -> Iterator[Piece]:
    """Yield the pieces of a stage in the order of the flat vector. A piece has the matrices, or the vectors,
    of one block in one plane. It begins with the row of its first parameter (*entry* of the layout), and ends
    where the next piece of the plane begins."""
    for number, plane in enumerate(layout.planes):
        inside = [entry for entry in layout.entries if plane.offset <= entry.offset < plane.stop]
        inside.sort(key=lambda entry: entry.offset)
        grouped = groupby(inside, lambda entry: (entry.block, entry.is_vector))
        entries_of_pieces = [tuple(entries) for _, entries in grouped]
        firsts = [(entries[0].offset - plane.offset) // plane.chunk for entries in entries_of_pieces]
        stops = [*firsts[1:], plane.chunks]
        for entries, first, stop in zip(entries_of_pieces, firsts, stops, strict=True):
            block = entries[0].block
            yield Piece(block=block, plane=number, first=first, chunks=stop - first, entries=entries)


def _part_of(entry: Entry, placed: list[tuple[DeviceRange, int]]) -> Entry:
    """Return the entry of a parameter in a device's share: a vector of the values that the device has, or an
    empty one. `placed` are the device's ranges of the stage's flat vector, each with its offset in the share.
    A parameter lies in one piece, and a device has at most one range of that."""
    for device_range, offset in placed:
        start = max(entry.offset, device_range.start)
        stop = min(entry.offset + entry.size, device_range.stop)
        if start < stop:
            return replace(entry, shape=(stop - start,), offset=offset + start - device_range.start)
    return replace(entry, shape=(0,), offset=0)
