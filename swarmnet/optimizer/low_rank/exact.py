"""Matrix products with the same bits on every machine: integers in floating-point numbers that are exact.

A matrix of small numbers is stored as integers of 2**-20. No partial sum of a product exceeds the product of
two norms (Cauchy-Schwarz), so it stays below 2**53. Then it is rounded to the grid again. Therefore neither
the order of a sum, nor threads, nor the device can change a bit.

Shapes: M rows and K columns of a matrix, K at most M; L length of a direction (`subspace.py`).
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from swarmnet.optimizer.low_rank.subspace import Subspace

BITS = 20
"""A matrix with singular values of at most 1.3 has columns below 2**20.4, so products stay below 2**41."""
COARSE_BITS = 14
"""Bits for the norm of a matrix: the squares of 2**25 numbers add up to less than 2**53."""
TOLD_BITS = 18
"""Bits of the values that become a step. A row of at most 1.3, times one of 1,024 signs, is below 2**23.4 and
exact in float32."""
NEWTON_SCHULZ = (3527, -4890, 2080)
"""Muon's coefficients (`inner_step.py`) in 1024ths."""
COEFFICIENT_BITS = 10
STEPS = 5


def orthogonal(sums_MK: Tensor) -> Tensor:
    """Orthogonalize a matrix of integers below 2**53 by Muon's Newton-Schulz iteration. Returns float32 [M,
    K], integers of 2**-18, with singular values near 1. A zero matrix stays zero."""
    found_MK = _normalized(sums_MK.to(torch.float64))
    first, second, third = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram_KK = _shift_right_rounded(found_MK.T @ found_MK, BITS)
        square_KK = _shift_right_rounded(gram_KK @ gram_KK, BITS)
        change_KK = _shift_right_rounded(second * gram_KK + third * square_KK, COEFFICIENT_BITS)
        changed_MK = _shift_right_rounded(found_MK @ change_KK, BITS)
        found_MK = _shift_right_rounded(first * found_MK + 2**COEFFICIENT_BITS * changed_MK, COEFFICIENT_BITS)
    return _shift_right_rounded(found_MK, BITS - TOLD_BITS).to(torch.float32)


def spread(told_MK: Tensor, directions: Subspace) -> Tensor:
    """Return float32 [M, L]: integers of 2**-18, times the subspace's scale."""
    # Any setting but "highest" runs float32 products in TF32 or bfloat16, which lose bits.
    exact = torch.get_float32_matmul_precision() == "highest"
    kind = torch.float32 if exact else torch.float64
    return (told_MK.to(kind) @ directions.signs.to(kind).T).to(torch.float32)


def _normalized(matrix_MK: Tensor) -> Tensor:
    """Return the matrix scaled to Frobenius norm 1, in integers of 2**-20."""
    largest = float(matrix_MK.abs().max())
    if largest == 0:
        return matrix_MK
    coarse_MK = torch.round(matrix_MK * (2.0**COARSE_BITS / largest))
    norm = sqrt(float((coarse_MK * coarse_MK).sum())) * largest / 2.0**COARSE_BITS
    return torch.round(matrix_MK * (2.0**BITS / norm))


def _shift_right_rounded(integers: Tensor, bits: int) -> Tensor:
    """Shift right by `bits`, rounded half to even."""
    return torch.round(integers * 2.0**-bits)
