"""Products that are the same to the bit on every machine: integers, in floating numbers that carry them
exactly.

A matrix of small numbers is integers of 2**-20. Each product of two is a sum that never leaves 2**53 on its
way, because no partial sum exceeds the product of two norms (Cauchy and Schwarz); then it is rounded to the
grid again. So neither the order of a sum, nor threads, nor the device can change a bit.

Shapes: M rows and K columns of a matrix, K at most M; L length of a direction (subspace.py).
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from swarmnet.optimizer.low_rank.subspace import Subspace

BITS = 20
"""A matrix whose singular values are at most 1.3 has columns below 2**20.4: products stay below 2**41."""
COARSE_BITS = 14
"""For the norm of a matrix: the squares of 2**25 numbers add up below 2**53."""
TOLD_BITS = 18
"""Of what becomes a step. A row of at most 1.3 times one of 1,024 signs is below 2**23.4: float32 carries
it."""
NEWTON_SCHULZ = (3527, -4890, 2080)
"""Muon's coefficients (inner_step.py) in 1024ths."""
COEFFICIENT_BITS = 10
STEPS = 5


def orthogonal(sums_MK: Tensor) -> Tensor:
    """float32 [M, K], integers of 2**-18: the matrix with singular values near 1 that is nearest to integers
    below 2**53. By Newton and Schulz's iteration, as Muon has it. A matrix of zeros stays one."""
    found_MK = _of_norm_one(sums_MK.to(torch.float64))
    first, second, third = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram_KK = _dropped(found_MK.T @ found_MK, BITS)
        square_KK = _dropped(gram_KK @ gram_KK, BITS)
        change_KK = _dropped(second * gram_KK + third * square_KK, COEFFICIENT_BITS)
        changed_MK = _dropped(found_MK @ change_KK, BITS)
        found_MK = _dropped(first * found_MK + 2**COEFFICIENT_BITS * changed_MK, COEFFICIENT_BITS)
    return _dropped(found_MK, BITS - TOLD_BITS).to(torch.float32)


def spread(told_MK: Tensor, directions: Subspace) -> Tensor:
    """float32 [M, L]: integers of 2**-18 times the subspace's scale."""
    # Anything but "highest" lets float32 products run in TF32 or bfloat16, which drop bits.
    exact = torch.get_float32_matmul_precision() == "highest"
    kind = torch.float32 if exact else torch.float64
    return (told_MK.to(kind) @ directions.signs.to(kind).T).to(torch.float32)


def _of_norm_one(matrix_MK: Tensor) -> Tensor:
    largest = float(matrix_MK.abs().max())
    if largest == 0:
        return matrix_MK
    coarse_MK = torch.round(matrix_MK * (2.0**COARSE_BITS / largest))
    norm = sqrt(float((coarse_MK * coarse_MK).sum())) * largest / 2.0**COARSE_BITS
    return torch.round(matrix_MK * (2.0**BITS / norm))


def _dropped(integers: Tensor, bits: int) -> Tensor:
    """Rounded, half to even."""
    return torch.round(integers * 2.0**-bits)
