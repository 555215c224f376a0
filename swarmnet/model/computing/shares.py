"""How a stage lies on several devices that hold it together: each has its rows of every piece.

A *piece* is what one block has in one plane of the flat vector, its matrices or its vectors: whole chunks,
one after the other. A device's *share* is of each piece so many chunks in a row, as torch.chunk cuts, which
is how torch.distributed.fsdp cuts a parameter [chunks, chunk]. A share has a layout of its own, in which a
method works as in that of any stage: chunks know nothing of each other.
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
    """In the whole flat vector."""

    def rows(self, device: int, devices: int) -> slice:
        """In the plane: those of one of so many devices; none, maybe."""
        each = -(-self.chunks // devices)
        start, stop = (self.first + min(number * each, self.chunks) for number in (device, device + 1))
        return slice(start, stop)


@dataclass(frozen=True, slots=True)
class Run:
    """Numbers of the whole flat vector that lie on one device, one after the other."""

    device: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a stage, on so many devices."""

    whole: Layout
    devices: int

    @property
    def pieces(self) -> list[Piece]:
        """In the order of the flat vector."""
        return list(pieces_of(self.whole))

    def rows(self, plane: int, device: int) -> list[slice]:
        """What of a plane's chunks one device has."""
        every = (piece.rows(device, self.devices) for piece in self.pieces if piece.plane == plane)
        return [rows for rows in every if rows.start < rows.stop]

    def runs(self) -> Iterator[Run]:
        """All of the flat vector, in its order; each device's own, one after the other, are its share."""
        for piece in self.pieces:
            plane = self.whole.planes[piece.plane]
            for device in range(self.devices):
                rows = piece.rows(device, self.devices)
                if rows.start < rows.stop:
                    start, stop = (plane.offset + row * plane.chunk for row in (rows.start, rows.stop))
                    yield Run(device, start, stop)

    def layout(self, device: int) -> Layout:
        """Of a device's share. Parameters lie in it by what they have there, as a row of numbers; of all that
        the stage has, in the same order, for some are told apart by their number."""
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
        """Only those of which it has something."""
        offset = 0
        for number, plane in enumerate(self.whole.planes):
            chunks = sum(rows.stop - rows.start for rows in self.rows(number, device))
            if chunks:
                yield Plane(offset, chunks, plane.chunk)
            offset += chunks * plane.chunk


def pieces_of(layout: Layout) -> Iterator[Piece]:
    """In the order of the flat vector."""
    for number, plane in enumerate(layout.planes):
        inside = [entry for entry in layout.entries if plane.offset <= entry.offset < plane.stop]
        inside.sort(key=lambda entry: entry.offset)
        grouped = groupby(inside, lambda entry: (entry.block, entry.is_vector))
        found = [tuple(entries) for _, entries in grouped]
        firsts = [(entries[0].offset - plane.offset) // plane.chunk for entries in found]
        for entries, first, stop in zip(found, firsts, [*firsts[1:], plane.chunks], strict=True):
            yield Piece(entries[0].block, number, first, stop - first, entries)


def _within(entry: Entry, places: list[tuple[Run, int]]) -> Entry:
    """What a share has of a parameter: it lies in one piece, so in one run of a device's."""
    for run, shift in places:
        start, stop = max(entry.offset, run.start), min(entry.offset + entry.size, run.stop)
        if start < stop:
            return replace(entry, shape=(stop - start,), offset=shift + start - run.start)
    return replace(entry, shape=(0,), offset=0)
