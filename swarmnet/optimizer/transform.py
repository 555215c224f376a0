"""Orthogonal transforms of chunks, and their exact inverse for integer votes.

A chunk of N = P * Q values is a P x Q matrix V. Its coefficients are L V R^T with orthogonal L and R. If N
exceeds P * Q (`tiling.py`), the rest of a chunk is zero and stays zero.

`exact_inverse` takes sums of votes and returns an integer multiple of the inverse. All values stay integers
that the number format represents exactly. The bits are therefore the same in any order of summation, with any
number of threads and on any device. Only the signs of the result have a meaning.

Shapes: C chunks, N values in a chunk, P rows and Q columns of a chunk.
"""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.optimizer.tiling import factors

DCT_BITS = 8
"""The integer DCT is round(2**8 * DCT). In the prototype 99.6 % of its signs equalled the ideal ones. Each
further bit halves the disagreement and doubles both factors of the bound."""
FINE_DCT_BITS = 20
"""Bits of `fine-dct`. Its entries are as accurate as float32's, because the largest are about 2**-2.5."""
FLOAT32_INTEGERS = 2**24
FLOAT64_INTEGERS = 2**53


class TransformError(ValueError):
    """The exact inverse would exceed the number formats."""


class Transform(Protocol):
    """The transform for one size of chunk."""

    def accumulate(self, momentum_CN: Tensor, values_CN: Tensor, keep: float) -> None:
        """Set momentum = keep * momentum + transform(values) in place. float32; overwrites `values_CN`."""

    def inverse(self, coefficients_CN: Tensor) -> Tensor:
        """Return the inverse, float32 [C, N]."""

    def exact_inverse(self, sums_CN: Tensor, bound: int) -> Tensor:
        """Return an integer multiple of the inverse of integer `sums_CN`, [C, N]. The magnitudes of each
        chunk add up to at most `bound`. The result has the number format that represents it exactly."""


class Hadamard:
    """Sylvester's matrices, with entries +1 and -1. They need only additions, and any integers represent them
    exactly. Butterflies need 12 additions per value; matrix products would need 128 multiplications. They run
    along rows only, so coefficients are stored transposed, with one transposition between the two passes."""

    def __init__(self, chunk: int) -> None:
        self._rows, self._columns = factors(chunk)
        self._norm = chunk**-0.5

    def accumulate(self, momentum_CN: Tensor, values_CN: Tensor, keep: float) -> None:
        values_CPQ = values_CN.mul_(self._norm).view(-1, self._rows, self._columns)
        coefficients_CN = _both_ways(values_CPQ).view_as(values_CN)
        torch.add(coefficients_CN, momentum_CN, alpha=keep, out=momentum_CN)

    def inverse(self, coefficients_CN: Tensor) -> Tensor:
        coefficients_CQP = coefficients_CN.clone().view(-1, self._columns, self._rows)
        return _both_ways(coefficients_CQP).view_as(coefficients_CN).mul_(self._norm)

    def exact_inverse(self, sums_CN: Tensor, bound: int) -> Tensor:
        sums_CQP = sums_CN.to(_integers_for(bound), copy=True).view(-1, self._columns, self._rows)
        return _both_ways(sums_CQP).view_as(sums_CN)


class Dct:
    """The orthonormal DCT-II, as in DeMo. Its exact inverse uses the basis rounded to 2**-8."""

    def __init__(self, sides: tuple[int, int], device: torch.device) -> None:
        ideal = [_dct(size).to(device) for size in sides]
        self._float = _Pair(*(matrix.to(torch.float32) for matrix in ideal))
        rounded = [torch.round(matrix * 2**DCT_BITS) for matrix in ideal]
        self._growth = int(rounded[0].abs().max() * rounded[1].abs().max())
        self._exact_32 = _Pair(*(matrix.to(torch.float32) for matrix in rounded))
        self._exact_64 = _Pair(*rounded)

    def accumulate(self, momentum_CN: Tensor, values_CN: Tensor, keep: float) -> None:
        self._float.accumulate(momentum_CN, values_CN, keep)

    def inverse(self, coefficients_CN: Tensor) -> Tensor:
        return self._float.inverse(coefficients_CN)

    def exact_inverse(self, sums_CN: Tensor, bound: int) -> Tensor:
        largest = bound * self._growth
        if largest > FLOAT64_INTEGERS:
            raise TransformError(f"sums of up to {bound} make values beyond 2**53: fewer peers, or hadamard")
        # Any setting but "highest" runs float32 products in TF32 or bfloat16, which lose bits.
        fits = largest <= FLOAT32_INTEGERS and torch.get_float32_matmul_precision() == "highest"
        pair, kind = (self._exact_32, torch.float32) if fits else (self._exact_64, torch.float64)
        return pair.inverse(sums_CN.to(kind))


class FineDct(Dct):
    """The same transform with the basis rounded to 2**-20, for coefficients that are values and not votes.
    Both products at once would exceed 2**53. The intermediate values are rounded to stay below it. This is
    one rounding of exact numbers, so it is the same everywhere."""

    def __init__(self, sides: tuple[int, int], device: torch.device) -> None:
        super().__init__(sides, device)
        left, right = (torch.round(_dct(size) * 2**FINE_DCT_BITS) for size in sides)
        self._largest = int(left.abs().max()), int(right.abs().max())
        self._fine = _Pair(left.to(device), right.to(device))

    def exact_inverse(self, sums_CN: Tensor, bound: int) -> Tensor:
        half, whole = bound * self._largest[0], bound * self._largest[0] * self._largest[1]
        if half > FLOAT64_INTEGERS:
            raise TransformError(f"sums of up to {bound} make values beyond 2**53: fewer peers, or hadamard")
        return self._fine.inverse(sums_CN.to(torch.float64), max(0, (2 * whole).bit_length() - 53))


class _Pair:
    """L V R^T for a batch of chunks. Single chunks are multiplied in batches, never as one large product. The
    rounding of a chunk must not depend on its neighbours, because stages may be cut anywhere."""

    def __init__(self, left_PP: Tensor, right_QQ: Tensor) -> None:
        self._left_PP = left_PP
        self._right_QQ = right_QQ

    def accumulate(self, momentum_CN: Tensor, values_CN: Tensor, keep: float) -> None:
        half_CPQ = torch.bmm(self._chunks(values_CN), self._right_QQ.t().expand(len(values_CN), -1, -1))
        left_CPP = self._left_PP.expand(len(values_CN), -1, -1)
        self._chunks(momentum_CN).baddbmm_(left_CPP, half_CPQ, beta=keep)

    def inverse(self, coefficients_CN: Tensor, dropped_bits: int = 0) -> Tensor:
        """Return the inverse. `dropped_bits` of the integers between the two products are rounded away."""
        chunks = coefficients_CN.shape[0]
        half_CPQ = torch.bmm(self._left_PP.t().expand(chunks, -1, -1), self._chunks(coefficients_CN))
        if dropped_bits:
            half_CPQ.mul_(2.0**-dropped_bits).round_()
        whole_CPQ = torch.bmm(half_CPQ, self._right_QQ.expand(chunks, -1, -1))
        if whole_CPQ[0].numel() == coefficients_CN.shape[1]:
            return whole_CPQ.view_as(coefficients_CN)
        padded_CN = torch.zeros_like(coefficients_CN)
        self._chunks(padded_CN).copy_(whole_CPQ)
        return padded_CN

    def _chunks(self, plane_CN: Tensor) -> Tensor:
        rows, columns = len(self._left_PP), len(self._right_QQ)
        return plane_CN[:, : rows * columns].view(-1, rows, columns)


def transform_of(
    name: str, chunk: int, device: torch.device, sides: tuple[int, int] | None = None
) -> Transform:
    """Return the transform `name` (`hadamard`, `dct`, `fine-dct`) for chunks of `chunk` values, a power of
    two.

    The DCTs are two-dimensional, over `sides` (rows, columns); by default the nearest to a square. Raises
    TransformError for another name.
    """
    match name:
        case "hadamard":
            return Hadamard(chunk)
        case "dct":
            return Dct(sides or factors(chunk), device)
        case "fine-dct":
            return FineDct(sides or factors(chunk), device)
    raise TransformError(f"no transform is called {name!r}")


def butterflies(values_CAB: Tensor) -> None:
    """Apply the unnormalised Hadamard transform along A in place, by additions alone. Intermediate integers
    may wrap. The result is correct modulo 2**bits, and so correct if it fits."""
    chunks, length, inner = values_CAB.shape
    half = 1
    while half < length:
        pairs = values_CAB.view(chunks, length // (2 * half), 2, half, inner)
        upper, lower = pairs[:, :, 0], pairs[:, :, 1]
        upper.add_(lower)
        torch.add(upper, lower, alpha=-2, out=lower)
        half *= 2


def _both_ways(values_CAB: Tensor) -> Tensor:
    """Return the unnormalised Hadamard transform along A and B, [C, B, A]. Overwrites its argument."""
    butterflies(values_CAB)
    values_CBA = values_CAB.transpose(1, 2).contiguous()
    butterflies(values_CBA)
    return values_CBA


def _integers_for(bound: int) -> torch.dtype:
    """Return the smallest integer dtype for values up to `bound`. Raises TransformError if there is none."""
    for kind in (torch.int16, torch.int32, torch.int64):
        if bound <= torch.iinfo(kind).max:
            return kind
    raise TransformError(f"sums of up to {bound} do not fit 64 bits")


def _dct(size: int) -> Tensor:
    """Return the DCT, float64 [size, size], row = frequency: sqrt(2 / n) cos(pi (2 j + 1) i / 2 n). Row 0 is
    sqrt(1 / n)."""
    return torch.tensor(
        [
            [sqrt((2 if i else 1) / size) * cos(pi * (2 * j + 1) * i / (2 * size)) for j in range(size)]
            for i in range(size)
        ],
        dtype=torch.float64,
    )
