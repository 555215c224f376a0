"""Views of a flat vector: its planes, and the tiles of a plane for cache- or memory-bounded work.

The module also clears padding, and defines how a method cuts the vector into chunks.

Shapes: C chunks of a plane, N elements of a chunk. R rows and S columns of chunks are in a matrix, and A rows
and B columns in one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Entry, Layout, Plane
from swarmnet.optimizer.index_code import log2_exact
from swarmnet.run.sync_methods import ChunkingName

TILE_CHUNKS = 64
"""Maximum number of chunks to work on at once. 64 * 4096 float32 are 1 MiB, about a core's second cache. On a
virtual EPYC with 1 MiB per core, half was 10 % slower (calls dominate), twice up to 20 % slower."""
ROUND_CHUNKS = 256
"""Number of chunks of a tile for a round: 256 * 4096 float32 are 4 MiB in addition to the vectors. It is a
multiple of 8, so that the bits of every tile start at a byte."""
GPU_TIMES = 8
"""Factor for both numbers on a GPU, which has no such cache, but a cost per call. With 476 million parameters
in 454 tiles a peer there spent 30 % of its time in steps and rounds."""
SIDE = 64
"""Longest side of a tile of a matrix (arXiv:2411.19870, section 3)."""


class ChunkLayout(Protocol):
    """Defines how the parameters of a stage are cut into chunks, in a vector of their own."""

    @property
    def layout(self) -> Layout:
        """Layout of that vector. A method works on its planes."""

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """For each plane A, B: rows and columns of its chunks. Elements beyond A * B are padding."""

    @property
    def shrinks(self) -> bool:
        """Whether a smaller chunk keeps fewer coefficients."""

    def chunked(self, flat: Tensor) -> Tensor:
        """Return the chunked vector [layout.size] of the stage's flat vector; it may be the same memory."""

    def flat(self, chunked: Tensor) -> Tensor:
        """Return the flat vector of a chunked one."""


@dataclass(frozen=True, slots=True)
class FlatChunks:
    """The flat vector unchanged. Chunks continue over the ends of rows and matrices."""

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
    """Tiles of matrices, as DeMo cuts (its paper's reference, `_get_smaller_split`). The side of a tile is
    the largest divisor up to 64 of the matrix side, so that no tile crosses an edge. Vectors are cut the same
    way. If a side has no such divisor, tiles are thin. A tile is stored in a chunk of the next power of two,
    so that codes of indices remain valid."""

    shrinks = False

    def __init__(self, layout: Layout) -> None:
        self._whole = layout
        grids = [(entry, _grid(entry)) for entry in layout.entries]
        kinds = sorted({(_chunk_size(grid), grid.tile) for _, grid in grids}, reverse=True)
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
            return flat  # The consumer refuses it with a message about its shape.
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
        """Yield the numbers of each parameter in both vectors, in the same order."""
        for entry, grid, there in self._places:
            inner = flat[entry.place]
            (rows, columns), (height, width) = grid.tiles, grid.tile
            inner_RASB = inner.view(rows, height, columns, width)
            tiles_CN = chunked[there.place].view(there.shape)
            yield inner_RASB.transpose(1, 2), tiles_CN[:, : height * width].view(rows, columns, height, width)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The tiles of one parameter."""

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
    """Return the largest divisor that is at most SIDE."""
    return next(length for length in range(min(SIDE, side), 0, -1) if side % length == 0)


def _chunk_size(grid: _Grid) -> int:
    """Return the power of two that holds a tile."""
    height, width = grid.tile
    return 1 << (height * width - 1).bit_length()


def cut_of(name: ChunkingName, layout: Layout) -> ChunkLayout:
    return MatrixTiles(layout) if name == "tiled" else FlatChunks(layout)


def factors(chunk: int) -> tuple[int, int]:
    """Return the two nearest powers of two whose product is `chunk`: 4096 = 64 * 64, 128 = 8 * 16."""
    exponent = log2_exact(chunk)
    return 2 ** (exponent // 2), 2 ** (exponent - exponent // 2)


@dataclass(frozen=True, slots=True)
class Tile:
    """A range of chunks of a plane."""

    number: int
    """Number of the plane."""
    plane: Plane
    first: int
    last: int
    """The first chunk after the tile."""

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
        """Return a view [C, N] of a vector [layout.size]."""
        return flat[self.start : self.stop].view(-1, self.plane.chunk)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the intersection with a range of the flat vector; empty if start is not below stop."""
        return max(start, self.start), min(stop, self.stop)

    def empty_padding(self, tile_CN: Tensor, layout: Layout) -> None:
        """Set elements of the tile that belong to no parameter to zero."""
        flat = tile_CN.view(-1)
        for start, stop in layout.padding:
            if start < self.stop and self.start < stop:
                flat[max(0, start - self.start) : stop - self.start] = 0


def all_tiles(layout: Layout, device: torch.device) -> Iterator[Tile]:
    """Yield tiles in the order of the flat vector, in a size for the device. The size affects no result."""
    most = _at_once(ROUND_CHUNKS, device)
    for number, plane in enumerate(layout.planes):
        for first in range(0, plane.chunks, most):
            yield Tile(number, plane, first, min(first + most, plane.chunks))


def _at_once(chunks: int, device: torch.device) -> int:
    return chunks if device.type == "cpu" else GPU_TIMES * chunks


def plane_of(flat: Tensor, plane: Plane) -> Tensor:
    """Return a view [C, N] of a vector [layout.size]."""
    return flat[plane.offset : plane.stop].view(plane.chunks, plane.chunk)


def rows_of(plane: Plane, shard: int, shards: int) -> slice:
    """Return the chunks of a plane in one of `shards` shards; none for some shards of a small plane."""
    return slice(plane.chunks * shard // shards, plane.chunks * (shard + 1) // shards)


def empty_padding(flat: Tensor, layout: Layout) -> None:
    """Set elements of a vector [layout.size] that belong to no parameter to zero."""
    for start, stop in layout.padding:
        flat[start:stop] = 0


def tiles_of(plane_CN: Tensor) -> Iterator[Tensor]:
    """Yield views of equal size of at most TILE_CHUNKS chunks each, more on a GPU."""
    chunks = plane_CN.shape[0]
    size = -(-chunks // -(-chunks // _at_once(TILE_CHUNKS, plane_CN.device)))
    return (plane_CN[start : start + size] for start in range(0, chunks, size))


def blocks_of(layout: Layout, device: torch.device) -> tuple[list[str], list[Tensor]]:
    """Return the names of the blocks, and for each plane the int64 [C] block numbers of its chunks."""
    names = list(layout.block_ranges())
    block_of_chunk = [torch.zeros(plane.chunks, dtype=torch.int64) for plane in layout.planes]
    for entry in layout.entries:
        for plane, numbers in zip(layout.planes, block_of_chunk, strict=True):
            if plane.offset <= entry.offset < plane.stop:
                first = (entry.offset - plane.offset) // plane.chunk
                last = (entry.offset + entry.size - 1 - plane.offset) // plane.chunk
                numbers[first : last + 1] = names.index(entry.block)
    return names, [numbers.to(device) for numbers in block_of_chunk]
