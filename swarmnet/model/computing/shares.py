"""Divide a stage among several devices: each one has its rows of every piece.

A *piece* is the part of one block in one plane of the flat vector: its matrices or its vectors, in whole
chunks. A device's *share* is a range of chunks of each piece, cut as torch.chunk does. torch.distributed.fsdp
cuts a parameter [chunks, chunk] the same way. A share has its own layout, and a method works in it as in that
of any stage, because chunks are independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

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
        """Return the rows of the plane that belong to one of `devices` devices; they may be empty."""
        each = -(-self.chunks // devices)
        start, stop = (self.first + min(number * each, self.chunks) for number in (device, device + 1))
        return slice(start, stop)


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous range of the whole flat vector that lies on one device."""

    device: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of a stage on `devices` devices."""

    whole: Layout
    devices: int

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in the order of the flat vector."""
        return list(pieces_of(self.whole))

    def rows(self, plane: int, device: int) -> list[slice]:
        """Return the ranges of a plane's chunks that one device has."""
        every = (piece.rows(device, self.devices) for piece in self.pieces if piece.plane == plane)
        return [rows for rows in every if rows.start < rows.stop]

    def runs(self) -> Iterator[Run]:
        """Yield all of the flat vector in order. A device's share is its own runs, one after the other."""
        for piece in self.pieces:
            plane = self.whole.planes[piece.plane]
            for device in range(self.devices):
                rows = piece.rows(device, self.devices)
                if rows.start < rows.stop:
                    start, stop = (plane.offset + row * plane.chunk for row in (rows.start, rows.stop))
                    yield Run(device, start, stop)

    def layout(self, device: int) -> Layout:
        """Return the layout of a device's share. It has all parameters of the stage in the same order,
        because some code identifies them by number. Each is a row of the numbers that the device has."""
        runs, places, offset = [run for run in self.runs() if run.device == device], [], 0
        for run in runs:
            places.append((run, offset))
            offset += run.stop - run.start
        entries = tuple(_within(entry, places) for entry in self.whole.entries)
        padding = tuple(
            (shift + max(start, run.start) - run.start, shift + min(stop, run.stop) - run.start)
            for run, shift in places for start, stop in self.whole.padding
            if max(start, run.start) < min(stop, run.stop)
        )  # fmt: skip
        return Layout(entries, tuple(self._planes(device)), padding, offset)

    def _planes(self, device: int) -> Iterator[Plane]:
        """Yield the planes of which the device has a part."""
        offset = 0
        for number, plane in enumerate(self.whole.planes):
            chunks = sum(rows.stop - rows.start for rows in self.rows(number, device))
            if chunks:
                yield Plane(offset, chunks, plane.chunk)
            offset += chunks * plane.chunk


def pieces_of(layout: Layout) -> Iterator[Piece]:
    """Yield the pieces in the order of the flat vector."""
    for number, plane in enumerate(layout.planes):
        inside = [entry for entry in layout.entries if plane.offset <= entry.offset < plane.stop]
        inside.sort(key=lambda entry: entry.offset)
        grouped = groupby(inside, lambda entry: (entry.block, entry.is_vector))
        found = [tuple(entries) for _, entries in grouped]
        firsts = [(entries[0].offset - plane.offset) // plane.chunk for entries in found]
        for entries, first, stop in zip(found, firsts, [*firsts[1:], plane.chunks], strict=True):
            yield Piece(entries[0].block, number, first, stop - first, entries)


def _within(entry: Entry, places: list[tuple[Run, int]]) -> Entry:
    """Return a parameter's part in a share. A parameter is in one piece, so in one run of a device."""
    for run, shift in places:
        start, stop = max(entry.offset, run.start), min(entry.offset + entry.size, run.stop)
        if start < stop:
            return replace(entry, shape=(stop - start,), offset=shift + start - run.start)
    return replace(entry, shape=(0,), offset=0)
