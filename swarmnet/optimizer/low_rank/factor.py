"""Encode one peer's factor of one matrix: 8-bit numbers for some directions, and one power of two.

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
"""Levels are -127 to 127; the 256th code is invalid."""
LARGEST_EXPONENT = 31
"""2**15 numbers with this exponent add up to less than 2**53, which float64 represents exactly."""
FINEST = 2.0**-38
"""Size of one level at exponent 0, as a fraction of the clip. At the largest exponent the largest level is
about the clip, which no momentum exceeds."""
LOUDER = 1
"""An exponent counts at most this much above the median of the set's exponents (as in `local_steps.py`)."""


@dataclass(frozen=True, slots=True)
class Factor:
    """`levels` times 2**`exponent`, in units of 2**-38 of the clip."""

    levels: Tensor
    """int8 [M, K]."""
    exponent: int

    @classmethod
    def nearest(cls, values_MK: Tensor, clip: float) -> Factor:
        """Quantize float32 values to the nearest levels."""
        units_MK = values_MK / (clip * FINEST)
        largest = float(units_MK.abs().max()) / MOST
        exponent = min(LARGEST_EXPONENT, ceil(log2(largest)) if largest > 1 else 0)
        levels_MK = torch.round(units_MK * 2.0**-exponent).clamp(-MOST, MOST)
        return cls(levels_MK.to(torch.int8), exponent)

    def values(self, clip: float) -> Tensor:
        """Return the values, float32 [M, K]."""
        return self.levels.to(torch.float32) * (clip * FINEST * 2.0**self.exponent)

    def written(self) -> bytes:
        return bytes([self.exponent]) + self.levels.cpu().numpy().tobytes()

    @classmethod
    def read(cls, data: memoryview, shape: tuple[int, int], device: torch.device) -> Factor:
        """Parse a factor. Raises ContributionError if no honest peer can have written it."""
        levels = np.frombuffer(data, np.int8, offset=1)
        if data[0] > LARGEST_EXPONENT:
            raise ContributionError(f"an exponent of {data[0]}, above {LARGEST_EXPONENT}")
        if levels.min() < -MOST:
            raise ContributionError(f"a number of {-MOST - 1}, which no encoder writes")
        return cls(torch.from_numpy(levels.reshape(shape).copy()).to(device), data[0])


def bytes_of(shape: tuple[int, int]) -> int:
    return 1 + shape[0] * shape[1]


def sum_of(factors: Sequence[Factor]) -> Tensor:
    """Return int64 [M, K], the sum of a nonempty set of factors, each clipped to twice their median."""
    most = sorted(factor.exponent for factor in factors)[(len(factors) - 1) // 2] + LOUDER
    total_MK = torch.zeros_like(factors[0].levels, dtype=torch.int64)
    for factor in factors:
        total_MK += factor.levels.to(torch.int64) << min(factor.exponent, most)
    return total_MK
