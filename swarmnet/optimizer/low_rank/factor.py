"""What one peer says of one matrix: numbers of eight bits for some directions, and one power of two.

Shapes: M numbers of a direction, K directions, S contributions of a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np
import torch
from torch import Tensor

from swarmnet.optimizer.index_code import ContributionError

MOST = 127
"""Of eight bits: -127 to 127, and no meaning for the 256th."""
LARGEST_EXPONENT = 31
"""So that 2**15 of them add up below 2**53, which float64 carries exactly."""
FINEST = 2.0**-38
"""Of the clip: exponent 0. The largest exponent's most is the clip itself, which no momentum exceeds."""
LOUDER = 1
"""So much above the median of a set's exponents one counts at most (as in local_steps.py)."""


@dataclass(frozen=True, slots=True)
class Factor:
    """`levels` times 2**`exponent`, in units of 2**-38 of the clip."""

    levels: Tensor
    """int8 [M, K]."""
    exponent: int

    @classmethod
    def nearest(cls, values_MK: Tensor, clip: float) -> Factor:
        """To float32 values."""
        units_MK = values_MK / (clip * FINEST)
        largest = float(units_MK.abs().max()) / MOST
        exponent = min(LARGEST_EXPONENT, ceil(log2(largest)) if largest > 1 else 0)
        levels_MK = torch.round(units_MK * 2.0**-exponent).clamp(-MOST, MOST)
        return cls(levels_MK.to(torch.int8), exponent)

    def values(self, clip: float) -> Tensor:
        """float32 [M, K]."""
        return self.levels.to(torch.float32) * (clip * FINEST * 2.0**self.exponent)

    def written(self) -> bytes:
        return bytes([self.exponent]) + self.levels.cpu().numpy().tobytes()

    @classmethod
    def read(cls, data: memoryview, shape: tuple[int, int], device: torch.device) -> Factor:
        """ContributionError where nothing honest wrote it."""
        levels = np.frombuffer(data, np.int8, offset=1)
        if data[0] > LARGEST_EXPONENT:
            raise ContributionError(f"an exponent of {data[0]}, above {LARGEST_EXPONENT}")
        if levels.min() < -MOST:
            raise ContributionError(f"a number of {-MOST - 1}, which says nothing")
        return cls(torch.from_numpy(levels.reshape(shape).copy()).to(device), data[0])


def bytes_of(shape: tuple[int, int]) -> int:
    return 1 + shape[0] * shape[1]


def sum_of(factors: Sequence[Factor]) -> Tensor:
    """int64 [M, K]: of a set that is not empty, each no louder than twice their median."""
    most = sorted(factor.exponent for factor in factors)[(len(factors) - 1) // 2] + LOUDER
    total_MK = torch.zeros_like(factors[0].levels, dtype=torch.int64)
    for factor in factors:
        total_MK += factor.levels.to(torch.int64) << min(factor.exponent, most)
    return total_MK
