"""Views of a flat vector: its planes, and the tiles of a plane that fit a processor's cache, or beside all
that a peer holds; its padding; and how a method cuts it in chunks.

Shapes: C chunks of a plane, N elements of a chunk, R rows and S columns of chunks in a matrix, A rows and B
columns of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Entry, Layout, Plane
from swarmnet.optimizer.index_code import log2_exact
from swarmnet.run.manifest import CutName

TILE_CHUNKS = 64
"""Most chunks worked on at once: 64 * 4096 float32 are 1 MiB, about a core's second cache. Half of that
was 10 % slower on a virtual EPYC with 1 MiB per core (calls dominate), twice as much up to 20 % slower."""
ROUND_CHUNKS = 256
"""Of a tile of all that a peer holds: 256 * 4096 float32 are 4 MiB beside the vectors. A multiple of 8, so
that bits which lie one after the other begin with a byte in each."""
GPU_TIMES = 8
"""As many chunks at once on a GPU, which has no such cache and takes its time for each call: with 476 million
parameters in 454 tiles a peer there spent 30 % of its time in steps and rounds."""
SIDE = 64
"""Longest side of a tile of a matrix (arXiv:2411.19870, section 3)."""


class Cut(Protocol):
    """How the parameters of a stage are cut in chunks, in a vector of their own."""

    @property
    def layout(self) -> Layout:
        """Of that vector: its planes are what a method works on."""

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """Of each plane A, B: rows and columns of its chunks. What a chunk has beyond A * B is padding."""

    @property
    def shrinks(self) -> bool:
        """Whether of a smaller chunk fewer coefficients are kept."""

    def chunked(self, flat: Tensor) -> Tensor:
        """[layout.size] of the stage's flat vector; it may be the same memory."""

    def flat(self, chunked: Tensor) -> Tensor:
        """The other way."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The flat vector as it lies: chunks go on over the ends of rows and matrices."""

    layout: Layout
    shrinks: bool = field(default=True, init=False)

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        return tuple(factors(plane.chunk) for plane in self.layout.planes)

    def chunked(self, flat: Tensor) -> Tensor:
        return flat

    def flat(self, chunked: Tensor) -> Tensor:
        return chunked


class MatrixTiles:
    """As DeMo cuts (its paper's reference, `_get_smaller_split`): of each side of a matrix the largest
    divisor up to 64, so that no tile crosses an edge; of a vector likewise. Of a side without such a divisor
    tiles are thin.

    A tile lies in a chunk of the next power of two, so that codes of indices stay what they are.
    """

    shrinks = False

    def __init__(self, layout: Layout) -> None:
        self._whole = layout
        grids = [(entry, _grid(entry)) for entry in layout.entries]
        kinds = sorted({(_room(grid), grid.tile) for _, grid in grids}, reverse=True)
        self.sides = tuple(tile for _, tile in kinds)
        entries: list[Entry] = []
        planes: list[Plane] = []
        self._places: list[tuple[Entry, _Grid, Entry]] = []
        offset = 0
        for chunk, tile in kinds:
            start = offset
            for entry, grid in grids:
                if grid.tile == tile:
                    entries.append(Entry(entry.name, (grid.count, chunk), offset, entry.block))
                    self._places.append((entry, grid, entries[-1]))
                    offset += grid.count * chunk
            planes.append(Plane(start, (offset - start) // chunk, chunk))
        self.layout = Layout(tuple(entries), tuple(planes), (), offset)

    def chunked(self, flat: Tensor) -> Tensor:
        if flat.shape != (self._whole.size,):
            return flat  # Whoever takes it in refuses it, and says its shape.
        chunked = flat.new_zeros(self.layout.size)
        for inner_RSAB, tiles_RSAB in self._views(flat, chunked):
            tiles_RSAB.copy_(inner_RSAB)
        return chunked

    def flat(self, chunked: Tensor) -> Tensor:
        flat = chunked.new_zeros(self._whole.size)
        for inner_RSAB, tiles_RSAB in self._views(flat, chunked):
            inner_RSAB.copy_(tiles_RSAB)
        return flat

    def _views(self, flat: Tensor, chunked: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each parameter its numbers in both vectors, in one order."""
        for entry, grid, there in self._places:
            inner = flat[entry.place]
            (rows, columns), (height, width) = grid.tiles, grid.tile
            inner_RASB = inner.view(rows, height, columns, width)
            tiles_CN = chunked[there.place].view(there.shape)
            yield inner_RASB.transpose(1, 2), tiles_CN[:, : height * width].view(rows, columns, height, width)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Of one parameter."""

    tiles: tuple[int, int]
    """R, S."""
    tile: tuple[int, int]
    """A, B."""

    @property
    def count(self) -> int:
        return self.tiles[0] * self.tiles[1]


def _grid(entry: Entry) -> _Grid:
    rows, columns = entry.shape if len(entry.shape) == 2 else (1, entry.size)
    height, width = _divisor(rows), _divisor(columns)
    return _Grid((rows // height, columns // width), (height, width))


def _divisor(side: int) -> int:
    """The largest that is at most SIDE."""
    return next(length for length in range(min(SIDE, side), 0, -1) if side % length == 0)


def _room(grid: _Grid) -> int:
    """The power of two that holds a tile."""
    height, width = grid.tile
    return 1 << (height * width - 1).bit_length()


def cut_of(name: CutName, layout: Layout) -> Cut:
    return MatrixTiles(layout) if name == "tiles" else Runs(layout)


def factors(chunk: int) -> tuple[int, int]:
    """The two powers of two nearest to each other whose product is `chunk`: 4096 = 64 * 64, 128 = 8 * 16."""
    exponent = log2_exact(chunk)
    return 2 ** (exponent // 2), 2 ** (exponent - exponent // 2)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some chunks of a plane."""

    number: int
    """Of the plane."""
    plane: Plane
    first: int
    last: int
    """Before this chunk it ends."""

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    @property
    def chunks(self) -> int:
        return self.last - self.first

    @property
    def start(self) -> int:
        return self.plane.offset + self.first * self.plane.chunk

    @property
    def stop(self) -> int:
        return self.plane.offset + self.last * self.plane.chunk

    def of(self, flat: Tensor) -> Tensor:
        """View [C, N] of a vector [layout.size]."""
        return flat[self.start : self.stop].view(-1, self.plane.chunk)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """What it has of a part of the flat vector, from where to where in that; nothing: not ascending."""
        return max(start, self.start), min(stop, self.stop)

    def empty_padding(self, tile_CN: Tensor, layout: Layout) -> None:
        """Numbers of these that belong to no parameter are zero again."""
        flat = tile_CN.view(-1)
        for start, stop in layout.padding:
            if start < self.stop and self.start < stop:
                flat[max(0, start - self.start) : stop - self.start] = 0


def all_tiles(layout: Layout, device: torch.device) -> Iterator[Tile]:
    """In the order of the flat vector, as large as suits the device; how it is cut decides no bit."""
    most = _at_once(ROUND_CHUNKS, device)
    for number, plane in enumerate(layout.planes):
        for first in range(0, plane.chunks, most):
            yield Tile(number, plane, first, min(first + most, plane.chunks))


def _at_once(chunks: int, device: torch.device) -> int:
    return chunks if device.type == "cpu" else GPU_TIMES * chunks


def plane_of(flat: Tensor, plane: Plane) -> Tensor:
    """View [C, N] of a vector [layout.size]."""
    return flat[plane.offset : plane.stop].view(plane.chunks, plane.chunk)


def empty_padding(flat: Tensor, layout: Layout) -> None:
    """Numbers of a vector [layout.size] that belong to no parameter are zero again."""
    for start, stop in layout.padding:
        flat[start:stop] = 0


def tiles_of(plane_CN: Tensor) -> Iterator[Tensor]:
    """Views of at most TILE_CHUNKS chunks each, on a GPU of more, as equal as can be."""
    chunks = plane_CN.shape[0]
    size = -(-chunks // -(-chunks // _at_once(TILE_CHUNKS, plane_CN.device)))
    return (plane_CN[start : start + size] for start in range(0, chunks, size))


def blocks_of(layout: Layout, device: torch.device) -> tuple[list[str], list[Tensor]]:
    """Names of the blocks, and per plane the int64 [C] number of each chunk's block."""
    names = list(layout.block_ranges())
    block_of_chunk = [torch.zeros(plane.chunks, dtype=torch.int64) for plane in layout.planes]
    for entry in layout.entries:
        for plane, numbers in zip(layout.planes, block_of_chunk, strict=True):
            if plane.offset <= entry.offset < plane.stop:
                first = (entry.offset - plane.offset) // plane.chunk
                last = (entry.offset + entry.size - 1 - plane.offset) // plane.chunk
                numbers[first : last + 1] = names.index(entry.block)
    return names, [numbers.to(device) for numbers in block_of_chunk]
