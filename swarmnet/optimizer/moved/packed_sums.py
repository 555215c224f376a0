"""What a round's contributions come to, in as few bits as hold it exactly: several rounds are open at a time.

Most peers say a chunk's numbers as small integers times a power of two. So their sum is a small integer times
a power of two, and most sums of a byte or two each are exact.

Shapes: C chunks of a plane, M numbers of a chunk that a round speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Sums:
    """Of some chunks."""

    numbers: Tensor
    """[C, M]: of the least kind of integer that holds them."""
    shifts: Tensor
    """int32 [C, 1]: a sum is its number times two to this."""
    counts: Tensor | int
    """Of how many each is, int64 [C, 1], or all."""

    def means(self) -> Tensor:
        """int32 [C, M]: halves upwards."""
        if isinstance(self.counts, int) and self.counts == 1:
            return self.numbers.to(torch.int32) << self.shifts
        return mean_of(self.numbers.to(torch.int64) << self.shifts, self.counts)


def packed(sum_CM: Tensor, counts: Tensor | int) -> Sums:
    """Of int32 or int64 sums. `counts`: of how many each is, int64 [C, 1], or all; at least one."""
    largest_power = torch.iinfo(sum_CM.dtype).max // 2 + 1
    powers_CM = (sum_CM & -sum_CM).masked_fill_(sum_CM == 0, largest_power)  # The lowest bit of each.
    powers_C1 = powers_CM.amin(dim=1, keepdim=True)
    shifts_C1 = torch.frexp(powers_C1.to(torch.float64)).exponent - 1
    numbers_CM = sum_CM >> shifts_C1
    largest = int(numbers_CM.abs().max()) if numbers_CM.numel() else 0
    kind = next(kind for kind in NUMBERS if largest <= torch.iinfo(kind).max)
    if isinstance(counts, Tensor) and bool((counts == 1).all()):
        counts = 1
    return Sums(numbers_CM.to(kind), shifts_C1, counts)


def mean_of(sum_CM: Tensor, count: Tensor | int) -> Tensor:
    """int32: of so many, halves upwards. Divided in float64, of which a processor divides several at once: a
    quotient is below 2**31, so it is rounded by less than 2**-21, and where it is no integer it is at least
    2**-20 away from one, for counts below 2**19."""
    doubled = (2 * sum_CM + count).to(torch.float64)
    return torch.floor(doubled / (2 * count)).to(torch.int32)
