"""Divide the parameters of a stage among rounds: which numbers a fragment has.

A fragment consists of whole matrices, because the polar factor of a matrix takes as long for one of its
numbers as for all. Every block (a layer, an expert, a table) is divided alone, by names and shapes only.
Votes are therefore the same however the layers are cut into stages. Each layer begins with another fragment,
so that the unequal lengths of a layer's shares level out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from swarmnet.model.flat_layout import Entry
from swarmnet.model.parameters import trains_with_muon

MATRIX_ROUNDS = 4
"""With more fragments than this, a matrix is cut into several pieces, so that no step of a piece is longer
than that of this many rounds."""
LONGEST_PIECE = 1.5
"""Longest piece of a matrix, in units of a fragment's share of the block. It is not below 4/3, because a
gated expert has three matrices of one size, which stay whole with four fragments."""
NEXT_LAYER = 3
"""How many fragments later the next layer begins; odd, so that a power of two of them all have their turn."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive numbers of a parameter."""

    parameter: int
    """Number of the parameter in the order of the layout."""
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut_fragments(
    entries: Sequence[Entry], shapes: Sequence[tuple[int, ...]], fragments: int
) -> list[list[Piece]]:
    """Return the pieces of each fragment. `shapes` are those of the whole parameters, of which `entries` may
    be shards."""
    blocks: defaultdict[str, list[Piece]] = defaultdict(list)
    sizes: defaultdict[str, int] = defaultdict(int)
    for entry, shape in zip(entries, shapes, strict=True):
        sizes[entry.block] += prod(shape)
    for number, (entry, shape) in enumerate(zip(entries, shapes, strict=True)):
        size, parts = prod(shape), 1
        if trains_with_muon(entry.name, shape):
            longest = max(1, int(LONGEST_PIECE * sizes[entry.block]) // fragments)
            parts = max(fragments // MATRIX_ROUNDS, -(-size // longest))
        elif len(shape) > 1:
            parts = fragments
        parts = max(1, min(parts, size))
        cuts = pairwise(size * part // parts for part in range(parts + 1))
        blocks[entry.block] += [Piece(number, start, stop) for start, stop in cuts]
    found: list[list[Piece]] = [[] for _ in range(fragments)]
    for block, pieces in blocks.items():
        first = NEXT_LAYER * sum(int(part) for part in block.split(".") if part.isdecimal())
        for share, members in enumerate(_shares(pieces, fragments)):
            found[(first + share) % fragments] += members
    return found


def _shares(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Divide pieces into shares: the longest piece first, each to the share that is the shortest so far."""
    shares: list[list[Piece]] = [[] for _ in range(count)]
    lengths = [0] * count
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        shortest = lengths.index(min(lengths))
        shares[shortest].append(piece)
        lengths[shortest] += piece.size
    return shares
