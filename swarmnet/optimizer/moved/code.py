"""What every way to tell what a peer moved has to offer, how it lies in a payload, and the sum of what
several told.

One peer cannot be louder than the others let it: of a chunk no number counts for more than twice the median,
over the set, of the largest that each says there.

Shapes: C chunks of a plane, M numbers of a chunk that a round speaks of, S contributions of a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.optimizer.index_code import packed_bytes

LARGEST_EXPONENT = 20
"""Of a power of two, in units of 2**-22: a quarter, more than any weight moves in a round; and a thousand of
them add up within 31 bits."""
LARGEST = 1 << LARGEST_EXPONENT
"""No number of a contribution is larger, in units."""
LOUDER = 2
"""So many times the median of a set one counts at most."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Where a payload says nothing of its own accord: what peer and round decide."""

    seed: bytes
    chunk: int


class Moves(Protocol):
    """What one contribution says of some chunks of one plane."""

    def loudest(self) -> Tensor:
        """int32 [C, 1]: no number of a chunk is larger, in units; LARGEST at most."""

    def units(self) -> Tensor:
        """int32 [C, M], for the caller to write into."""

    def rows(self, rows: slice) -> Moves:
        """Of these chunks alone."""

    def written(self) -> bytes:
        """What `Code.read` reads."""


class Code(Protocol):
    """One way to tell numbers: of all chunks so many bytes, one after the other, then of all so many bits."""

    @property
    def head(self) -> int:
        """Bytes of each chunk."""

    def bits(self, width: int) -> int:
        """Of each chunk of `width` numbers."""

    def say(self, moved_CM: Tensor, draw: Draw) -> Moves:
        """Of float32 moves what can be told."""

    def read(self, data: memoryview, chunks: int, width: int, device: torch.device) -> Moves:
        """ContributionError where no honest peer can have written `data`, which has the right length."""

    def check(self, data: memoryview, chunks: int, width: int) -> None:
        """As `read`, of which nothing is wanted: a payload may be megabytes."""


def bytes_of(code: Code, chunks: int, width: int) -> int:
    """Exact length of what is written of so many chunks of `width` numbers."""
    return code.head * chunks + packed_bytes(chunks, code.bits(width))


def cut(code: Code, data: memoryview, chunks: int, width: int, rows: slice) -> memoryview:
    """Of what is written of so many chunks what some say, as if it were said of no others. The first of them
    has a multiple of eight before it, so that its bits begin a byte."""
    bits, bodies = code.bits(width), data[code.head * chunks :]
    heads = data[code.head * rows.start : code.head * rows.stop]
    return memoryview(bytes(heads) + bodies[rows.start * bits // 8 : packed_bytes(rows.stop, bits)])


def joined(code: Code, written: Sequence[tuple[int, bytes]]) -> bytes:
    """The other way: of chunks of one plane, so many each time, all but the last a multiple of eight."""
    heads = b"".join(data[: code.head * chunks] for chunks, data in written)
    return heads + b"".join(data[code.head * chunks :] for chunks, data in written)


def sum_of(contributions: Sequence[Moves]) -> Tensor:
    """int32 [C, M]: the sum of moves no louder than the set lets them be. At least one."""
    loudest_SC1 = torch.stack([moves.loudest() for moves in contributions])
    most_C1 = LOUDER * loudest_SC1.sort(dim=0).values[(len(contributions) - 1) // 2]
    # Of a set of equals hardly anybody is that loud, and a clamp is as dear as the sum.
    heard = (
        moves.units().clamp(-most_C1, most_C1) if (loudest_C1 > most_C1).any() else moves.units()
        for moves, loudest_C1 in zip(contributions, loudest_SC1, strict=True)
    )
    sum_CM = next(heard)
    for units_CM in heard:
        sum_CM += units_CM
    return sum_CM
