"""Views of a flat vector: its planes, and the tiles of a plane that fit a processor's cache; and its padding.

Shapes: C chunks of a plane, N elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Layout, Plane

TILE_CHUNKS = 64
"""Most chunks worked on at once: 64 * 4096 float32 are 1 MiB, about a core's second cache. Half of that
was 10 % slower on a virtual EPYC with 1 MiB per core (calls dominate), twice as much up to 20 % slower."""


ROUND_CHUNKS = 256
"""Of a tile of all that a peer holds: 256 * 4096 float32 are 4 MiB beside the vectors. A multiple of 8, so
that bits which lie one after the other begin with a byte in each."""


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
    def start(self) -> int:
        return self.plane.offset + self.first * self.plane.chunk

    @property
    def stop(self) -> int:
        return self.plane.offset + self.last * self.plane.chunk

    def of(self, flat: Tensor) -> Tensor:
        """View [C, N] of a vector [layout.size]."""
        return flat[self.start : self.stop].view(-1, self.plane.chunk)

    def empty_padding(self, tile_CN: Tensor, layout: Layout) -> None:
        """Numbers of these that belong to no parameter are zero again."""
        flat = tile_CN.view(-1)
        for start, stop in layout.padding:
            if start < self.stop and self.start < stop:
                flat[max(0, start - self.start) : stop - self.start] = 0


def all_tiles(layout: Layout) -> Iterator[Tile]:
    """In the order of the flat vector."""
    for number, plane in enumerate(layout.planes):
        for first in range(0, plane.chunks, ROUND_CHUNKS):
            yield Tile(number, plane, first, min(first + ROUND_CHUNKS, plane.chunks))


def plane_of(flat: Tensor, plane: Plane) -> Tensor:
    """View [C, N] of a vector [layout.size]."""
    return flat[plane.offset : plane.stop].view(plane.chunks, plane.chunk)


def empty_padding(flat: Tensor, layout: Layout) -> None:
    """Numbers of a vector [layout.size] that belong to no parameter are zero again."""
    for start, stop in layout.padding:
        flat[start:stop] = 0


def tiles_of(plane_CN: Tensor) -> Iterator[Tensor]:
    """Views of at most TILE_CHUNKS chunks each, as equal as can be."""
    chunks = plane_CN.shape[0]
    size = -(-chunks // -(-chunks // TILE_CHUNKS))
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
