"""Delta codec with eight bits per number: multiples, -127 to 127, of a power of two for each chunk.

Shapes: C chunks, M numbers of a chunk that a round covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarmnet.model.fixed_point import UNIT
from swarmnet.optimizer.delta_codecs import exponents
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST_EXPONENT, CodecSeed
from swarmnet.optimizer.index_code import ContributionError

MOST = 127
"""-128 is invalid, so that every number has one form."""
LARGEST_STEP = LARGEST_EXPONENT - 7
"""Exponent of the largest step: 127 of them are less than LARGEST."""


@dataclass(frozen=True, slots=True)
class EncodedInt8:
    """A delta in whole steps."""

    levels: Tensor
    """int8 [C, M]: -127 to 127."""
    exponents: Tensor
    """Exponents of the steps, as powers of 2 in units: int32 [C, 1]."""

    def max_abs(self) -> Tensor:
        return self.levels.to(torch.int32).abs().amax(dim=1, keepdim=True) << self.exponents

    def units(self) -> Tensor:
        return self.levels.to(torch.int32) << self.exponents

    def rows(self, rows: slice) -> EncodedInt8:
        return EncodedInt8(self.levels[rows], self.exponents[rows])

    def written(self) -> bytes:
        return exponents.written(self.exponents) + self.levels.contiguous().cpu().numpy().tobytes()


class Int8Codec:
    """The 8-bit codec."""

    head = 1

    def bits(self, width: int) -> int:
        return 8 * width

    def encode(self, delta_CM: Tensor, draw: CodecSeed) -> EncodedInt8:
        """Quantize with the smallest step that covers the largest number of a chunk."""
        units_CM = delta_CM / UNIT
        largest_C1 = units_CM.abs().amax(dim=1, keepdim=True)
        steps_C1 = (largest_C1 / MOST).clamp(min=1.0).log2().ceil().to(torch.int32).clamp(max=LARGEST_STEP)
        levels_CM = (units_CM / torch.exp2(steps_C1)).round().clamp(-MOST, MOST)
        return EncodedInt8(levels_CM.to(torch.int8), steps_C1)

    def decode(self, data: memoryview, chunks: int, width: int, device: torch.device) -> EncodedInt8:
        self.check(data, chunks, width)
        levels = np.frombuffer(data, np.int8, offset=chunks).reshape(chunks, width).copy()
        exponents_C = exponents.read(data, chunks, LARGEST_STEP)
        return EncodedInt8(torch.from_numpy(levels).to(device), exponents.tensor_of(exponents_C, device))

    def check(self, data: memoryview, chunks: int, width: int) -> None:
        exponents.read(data, chunks, LARGEST_STEP)
        if np.frombuffer(data, np.int8, offset=chunks).min(initial=0) < -MOST:
            raise ContributionError("eight bits that say nothing: -128")
