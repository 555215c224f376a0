"""What the others of a group think of one peer's votes: how many they share, how many they outvote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Concord:
    """One peer's votes in one round. Votes of noise are agreed with and opposed equally often."""

    agreed: int
    """The others who voted on that coefficient mostly voted so, too."""
    opposed: int
    """They mostly voted the other way."""
    alone: int
    """Nobody else voted on it, or the others are even."""

    def __add__(self, other: Concord) -> Concord:
        return Concord(self.agreed + other.agreed, self.opposed + other.opposed, self.alone + other.alone)


def concord(votes: Tensor, sums: Tensor) -> Concord:
    """`votes`: integers +1 or -1 (0: none); `sums`: of all votes on the same coefficients, these included."""
    product = votes * (sums - votes)
    agreed, opposed = int(torch.count_nonzero(product > 0)), int(torch.count_nonzero(product < 0))
    return Concord(agreed, opposed, product.numel() - agreed - opposed)
