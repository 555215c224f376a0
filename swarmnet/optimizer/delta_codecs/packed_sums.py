"""Store the sum of a round's contributions exactly in few bits, because several rounds are open at a time.

Most peers send a chunk's numbers as small integers times a power of two. Their sum is then a small integer
times a power of two, and one or two bytes per number are usually exact.

Shapes: C chunks of a plane, M numbers of a chunk that a round covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64)


EXACT = {torch.float32: 24, torch.float64: 53}
"""All integers of this many bits are exact in this dtype."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of some chunks."""

    numbers: Tensor
    """[C, M], in the smallest integer dtype that holds them."""
    shifts: Tensor
    """int32 [C, 1]: a sum is its number times two to this power."""
    counts: Tensor | int
    """Number of contributions of each chunk, int64 [C, 1], or of all."""
    kind: torch.dtype
    """The dtype in which means are exact."""

    def means(self) -> Tensor:
        """Return the means, int32 [C, M], halves rounded upwards. Floating point is used because a processor
        divides several of its numbers at once. With n the count, 2 * sum + n is exact. If its quotient by 2n
        is no integer, it differs from one by at least 1 / 2n. The rounding error is less than that, because
        the quotient is less than 2**24 / 2n, or 2**53 / 2n."""
        if isinstance(self.counts, int) and self.counts == 1:
            return self.numbers.to(torch.int32) << self.shifts
        two_C1 = (torch.ones_like(self.shifts, dtype=torch.int64) << (self.shifts + 1)).to(self.kind)
        means_CM = (self.numbers * two_C1).add_(self.counts).div_(2 * self.counts)
        return means_CM.floor_().to(torch.int32)


def packed(sum_CM: Tensor, counts: Tensor | int) -> Sums:
    """Pack int32 or int64 sums of `counts` contributions: int64 [C, 1], or one number for all chunks."""
    bits_CM = sum_CM  # The bits that are set in any number of a chunk.
    while bits_CM.shape[1] > 1:
        half = -(-bits_CM.shape[1] // 2)
        bits_CM = bits_CM[:, :half] | bits_CM[:, -half:]
    lowest_C1 = (bits_CM & -bits_CM).to(torch.float64)
    shifts_C1 = (torch.frexp(lowest_C1).exponent - 1).clamp_(min=0)
    numbers_CM = sum_CM >> shifts_C1
    largest, count = _largest(numbers_CM), _largest(counts) if isinstance(counts, Tensor) else counts
    least = next(kind for kind in NUMBERS if largest <= torch.iinfo(kind).max)
    doubled = 2 * _largest(sum_CM) + count
    kind = next(kind for kind, bits in EXACT.items() if doubled < 2**bits)
    return Sums(numbers_CM.to(least), shifts_C1, 1 if count == 1 else counts, kind)


def _largest(integers: Tensor) -> int:
    least, most = torch.aminmax(integers)
    return max(-int(least), int(most))
