"""The interface of delta codecs, the layout of encoded deltas in a payload, and the robust sum of several.

One peer's influence is limited. In each chunk every value is clipped to twice the median, over the set, of
the contributions' maximum magnitudes.

Shapes: C chunks of a plane, M numbers of a chunk that a round covers, S contributions of a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.optimizer.index_code import packed_bytes

LARGEST_EXPONENT = 20
"""Largest exponent of a power of two in units of 2**-22. This power is a quarter, more than any weight moves
in a round, and a thousand of them add up within 31 bits."""
LARGEST = 1 << LARGEST_EXPONENT
"""Largest number of a contribution, in units."""
LOUDER = 2
"""Clip limit in multiples of the median of a set."""


@dataclass(frozen=True, slots=True)
class CodecSeed:
    """Pseudo-random choices of a payload, which follow from peer and round."""

    seed: bytes
    chunk: int


class EncodedDelta(Protocol):
    """The encoded delta of one contribution for some chunks of one plane."""

    def max_abs(self) -> Tensor:
        """Return int32 [C, 1]: a bound on the magnitudes of each chunk, in units; at most LARGEST."""

    def units(self) -> Tensor:
        """Return the values in units, int32 [C, M], which the caller may overwrite."""

    def rows(self, rows: slice) -> EncodedDelta:
        """Return the delta of these chunks alone."""

    def written(self) -> bytes:
        """Return the bytes that `DeltaCodec.read` parses."""


class DeltaCodec(Protocol):
    """A delta codec. The bytes are a head of fixed size for each chunk, then packed bits for each chunk."""

    @property
    def head(self) -> int:
        """Number of head bytes per chunk."""

    def bits(self, width: int) -> int:
        """Return the number of bits per chunk of `width` numbers."""

    def encode(self, delta_CM: Tensor, draw: CodecSeed) -> EncodedDelta:
        """Quantize float32 values to what can be sent."""

    def decode(self, data: memoryview, chunks: int, width: int, device: torch.device) -> EncodedDelta:
        """Parse `data` of the right length. Raises ContributionError if no honest peer can have made it."""

    def check(self, data: memoryview, chunks: int, width: int) -> None:
        """Validate like `read`, without building the values: a payload may be megabytes."""


def bytes_of(code: DeltaCodec, chunks: int, width: int) -> int:
    """Return the exact number of bytes of encoded `chunks` chunks of `width` numbers."""
    return code.head * chunks + packed_bytes(chunks, code.bits(width))


def cut(code: DeltaCodec, data: memoryview, chunks: int, width: int, rows: slice) -> memoryview:
    """Return the encoding of some of the chunks on their own. The first chunk's number is a multiple of
    eight, so that its bits start at a byte."""
    bits, bodies = code.bits(width), data[code.head * chunks :]
    heads = data[code.head * rows.start : code.head * rows.stop]
    return memoryview(bytes(heads) + bodies[rows.start * bits // 8 : packed_bytes(rows.stop, bits)])


def joined(code: DeltaCodec, written: Sequence[tuple[int, bytes]]) -> bytes:
    """Join the encodings of consecutive chunks of one plane, the inverse of `cut`. All but the last encoding
    have a multiple of eight chunks."""
    heads = b"".join(data[: code.head * chunks] for chunks, data in written)
    return heads + b"".join(data[code.head * chunks :] for chunks, data in written)


def sum_of(contributions: Sequence[EncodedDelta], weights: Sequence[int] | None = None) -> Tensor:
    """Return int32 [C, M]: the clipped sum of at least one delta; int64, each times its weight, if there are
    weights."""
    loudest_SC1 = torch.stack([moves.max_abs() for moves in contributions])
    most_C1 = LOUDER * loudest_SC1.sort(dim=0).values[(len(contributions) - 1) // 2]
    # In a set of equals clipping is rarely needed, and a clamp costs as much as the sum.
    clipped = (
        moves.units().clamp(-most_C1, most_C1) if (loudest_C1 > most_C1).any() else moves.units()
        for moves, loudest_C1 in zip(contributions, loudest_SC1, strict=True)
    )
    if weights is not None:
        clipped = (units.long() * weight for units, weight in zip(clipped, weights, strict=True))
    sum_CM = next(clipped)
    for units_CM in clipped:
        sum_CM += units_CM
    return sum_CM
