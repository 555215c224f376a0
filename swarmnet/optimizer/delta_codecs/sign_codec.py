"""Delta codec with one sign bit per number, and a power of two per chunk that is nearest to the mean size.

Shapes: C chunks, M numbers of a chunk that a round covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.fixed_point import UNIT
from swarmnet.optimizer.delta_codecs import exponents
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST_EXPONENT, CodecSeed
from swarmnet.optimizer.index_code import ContributionError, pack, unpack
from swarmnet.optimizer.sparsify import coin_flips


@dataclass(frozen=True, slots=True)
class EncodedSigns:
    """A delta with one size in each chunk."""

    negative: Tensor
    """bool [C, M]."""
    exponents: Tensor
    """Exponents of 2, in units: int32 [C, 1]."""

    def max_abs(self) -> Tensor:
        return torch.ones_like(self.exponents) << self.exponents

    def units(self) -> Tensor:
        # Eight times as fast as to choose between two sizes of each chunk.
        return (1 - 2 * self.negative.view(torch.int8)) * self.max_abs()

    def rows(self, rows: slice) -> EncodedSigns:
        return EncodedSigns(self.negative[rows], self.exponents[rows])

    def written(self) -> bytes:
        if self.negative.device.type == "cpu":
            return exponents.written(self.exponents) + pack(self.negative.numpy().view(np.uint8))
        return exponents.written(self.exponents) + packed_there(self.negative).cpu().numpy().tobytes()


class SignCodec:
    """The 1-bit codec."""

    head = 1

    def bits(self, width: int) -> int:
        return width

    def encode(self, delta_CM: Tensor, draw: CodecSeed) -> EncodedSigns:
        sizes_C1 = delta_CM.abs().mean(dim=1, keepdim=True) / UNIT
        nearest_C1 = sizes_C1.clamp(min=1.0).log2().round().to(torch.int32).clamp(max=LARGEST_EXPONENT)
        negative_CM, zero_CM = delta_CM < 0, delta_CM == 0
        if zero_CM.any():  # Zero has no code of its own, and a constant sign would be a bias.
            flips_M = torch.from_numpy(coin_flips(draw.seed, draw.chunk, delta_CM.shape[1]))
            negative_CM = torch.where(zero_CM, flips_M.to(delta_CM.device), negative_CM)
        return EncodedSigns(negative_CM, nearest_C1)

    def decode(self, data: memoryview, chunks: int, width: int, device: torch.device) -> EncodedSigns:
        exponents_C1 = exponents.tensor_of(exponents.read(data, chunks, LARGEST_EXPONENT), device)
        if device.type == "cpu":
            bits_CM = unpack(data[chunks:], chunks, width)
            return EncodedSigns(torch.from_numpy(bits_CM.view(np.bool_)), exponents_C1)
        self.check(data, chunks, width)
        packed = torch.from_numpy(np.frombuffer(data, np.uint8, offset=chunks).copy()).to(device)
        return EncodedSigns(unpacked_there(packed, chunks, width), exponents_C1)

    def check(self, data: memoryview, chunks: int, width: int) -> None:
        exponents.read(data, chunks, LARGEST_EXPONENT)
        spare = chunks * width % 8
        if spare and data[-1] >> spare:
            raise ContributionError("the spare bits at the end of a plane are not zero")


def packed_there(bits: Tensor) -> Tensor:
    """Return uint8 as `index_code.pack` does, packed on the device of the bits: less data leaves it."""
    flat = functional.pad(bits.reshape(-1).view(torch.uint8), (0, -bits.numel() % 8))
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (flat.view(-1, 8) << places).sum(dim=1, dtype=torch.uint8)


def unpacked_there(packed: Tensor, chunks: int, width: int) -> Tensor:
    """Return bool [C, M] from checked bytes; the inverse of `packed_there`."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    flat = (packed[:, None] >> places & 1).view(torch.bool)
    return flat.view(-1)[: chunks * width].view(chunks, width)
