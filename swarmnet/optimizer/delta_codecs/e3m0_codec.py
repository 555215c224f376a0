"""Delta codec E3M0, as in Streaming DiLoCo (arXiv:2501.18512): four bits per number, a sign and a power of
two.

A number may also be zero. The paper names no scale; here each chunk has its own, a power of two.

Shapes: C chunks, M numbers of a chunk that a round covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.model.fixed_point import UNIT
from swarmnet.optimizer.delta_codecs import exponents
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST_EXPONENT, CodecSeed
from swarmnet.optimizer.index_code import ContributionError

POWERS = 7
"""Number of powers in three bits, without zero."""
SIGN = 8
"""The fourth bit."""
LARGEST_SMALLEST = LARGEST_EXPONENT - POWERS + 1
"""Largest exponent of the smallest power that a chunk has."""
MIDDLE = 4 / 3
"""A number is rounded up to the next power from the middle between two on, which is three quarters of it."""


@dataclass(frozen=True, slots=True)
class EncodedE3M0:
    """A delta of powers of two and zeros."""

    codes: Tensor
    """uint8 [C, M]: 0 is zero, 1 to 7 a power and its six successors; SIGN marks a negative number."""
    exponents: Tensor
    """Exponents of the smallest powers, in units: int32 [C, 1]."""

    def max_abs(self) -> Tensor:
        return self._sizes().amax(dim=1, keepdim=True)

    def units(self) -> Tensor:
        sizes_CM = self._sizes()
        return torch.where(self.codes >= SIGN, -sizes_CM, sizes_CM)

    def _sizes(self) -> Tensor:
        powers_CM = (self.codes & POWERS).to(torch.int32)
        sizes_CM = torch.ones_like(powers_CM) << (powers_CM + self.exponents - 1).clamp(min=0)
        return torch.where(powers_CM > 0, sizes_CM, 0)

    def rows(self, rows: slice) -> EncodedE3M0:
        return EncodedE3M0(self.codes[rows], self.exponents[rows])

    def written(self) -> bytes:
        return exponents.written(self.exponents) + nibbles_written(self.codes.cpu().numpy())


class E3M0Codec:
    """The 4-bit codec."""

    head = 1

    def bits(self, width: int) -> int:
        return 4 * width

    def encode(self, delta_CM: Tensor, draw: CodecSeed) -> EncodedE3M0:
        """Quantize to the nearest powers. Numbers nearer to zero than to the smallest power become zero."""
        scaled_CM = delta_CM * (MIDDLE / UNIT)
        powers_CM = scaled_CM.abs().clamp(min=2.0**-9).log2().floor()
        smallest_C1 = powers_CM.amax(dim=1, keepdim=True) - (POWERS - 1)
        smallest_C1 = smallest_C1.clamp(0, LARGEST_SMALLEST)
        codes_CM = (powers_CM - smallest_C1 + 1).clamp(0, POWERS).to(torch.uint8)
        negative_CM = (delta_CM < 0) & (codes_CM > 0)
        return EncodedE3M0(codes_CM + SIGN * negative_CM.to(torch.uint8), smallest_C1.to(torch.int32))

    def decode(self, data: memoryview, chunks: int, width: int, device: torch.device) -> EncodedE3M0:
        exponents_C = exponents.read(data, chunks, LARGEST_SMALLEST)
        codes = nibbles_read(data[chunks:], chunks * width)
        if np.any(codes == SIGN):
            raise ContributionError("four bits that say nothing: the sign of nothing")
        codes_CM = torch.from_numpy(codes.reshape(chunks, width)).to(device)
        return EncodedE3M0(codes_CM, exponents.tensor_of(exponents_C, device))

    def check(self, data: memoryview, chunks: int, width: int) -> None:
        self.decode(data, chunks, width, torch.device("cpu"))


def nibbles_written(codes: NDArray[np.uint8]) -> bytes:
    """Pack two codes per byte, the first in the lower half, with zero after the last."""
    flat = codes.reshape(-1)
    if len(flat) % 2:
        flat = np.append(flat, np.uint8(0))
    return (flat[::2] | flat[1::2] << 4).astype(np.uint8).tobytes()


def nibbles_read(data: memoryview, count: int) -> NDArray[np.uint8]:
    """Return the codes, uint8 [count]. Raises ContributionError if the spare bits are not zero."""
    packed = np.frombuffer(data, np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
    if codes[count:].any():
        raise ContributionError("four bits past the end of a plane")
    return codes[:count]
