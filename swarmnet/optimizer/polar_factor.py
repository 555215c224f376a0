"""Polar factors of matrices, by Muon's Newton-Schulz iteration.

`orthogonal` is the iteration as Muon has it. `polar_factors` takes many matrices at once and is faster on a
CPU, for methods whose peers need not compute the same bits. Local steps keep `orthogonal`, because their
results would change by rounding.

Shapes: B matrices of one shape, R rows and C columns of a matrix, S the shorter of both, L the longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Entry
from swarmnet.optimizer.device_groups.device_group import DeviceGroup

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration (Keller Jordan 2024). It brings singular values to 0.7 to 1.2."""
NEWTON_SCHULZ_STEPS = 5
MIN_NORM = 1e-7
"""A matrix with a smaller norm counts as zero, and stays small."""
BATCH_NUMBERS = 1 << 24
"""Numbers of the matrices that a GPU orthogonalizes in one batch (at least one matrix). Small matrices would
leave it idle. In float32 they are 64 MiB, several times."""
CPU_BATCH_NUMBERS = 1 << 15
"""Numbers of the matrices that a CPU orthogonalizes in one batch (at least one matrix): 128 KiB in float32.
16 matrices of 32 x 32 took a quarter of the time in a batch, of 64 x 64 half. Larger ones leave the cache."""
GRAM_RATIO = 1.5
"""L / S from which the iteration on Gram matrices is faster. A step of it multiplies four squares of side S.
A step on the matrix itself multiplies the equivalent of 2 L / S + 1."""


def matrix_batches(
    matrices: Sequence[Entry], device: torch.device, group: DeviceGroup
) -> Iterator[Sequence[Entry]]:
    """Yield matrices of one shape for `polar_factors`, in the same order on all devices of a group."""
    numbers = CPU_BATCH_NUMBERS if device.type == "cpu" else BATCH_NUMBERS
    for shape, of_shape in groupby(sorted(matrices, key=group.shape), group.shape):
        same, count = list(of_shape), max(1, numbers // prod(shape))
        yield from (same[first : first + count] for first in range(0, len(same), count))


def polar_factors(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices of one shape, float32 [B, R, C], with all singular values brought near 1."""
    matrices_BRC = torch.stack(list(matrices))
    short, long = sorted(matrices_BRC.shape[-2:])
    # bf16 on a GPU has too few digits for the square of a square.
    is_gram_faster = matrices_BRC.device.type == "cpu" and long >= GRAM_RATIO * short
    return _by_gram_matrix(matrices_BRC) if is_gram_faster else orthogonal(matrices_BRC)


def _by_gram_matrix(matrices_BRC: Tensor) -> Tensor:
    """Return the result of the Newton-Schulz iteration X' = (a + b G + c G^2) X, where G = X X^T. All factors
    are polynomials of the first G and commute, so the iteration computes their product and the next G from
    squares of side S alone. X is multiplied by the product in the end."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices_BRC.shape[-2] > matrices_BRC.shape[-1]
    found_BSL = matrices_BRC.mT if is_tall else matrices_BRC
    norms_B11 = torch.linalg.vector_norm(found_BSL, dim=(-2, -1), keepdim=True)
    found_BSL = found_BSL / norms_B11.clamp(min=MIN_NORM)
    gram_BSS = found_BSL @ found_BSL.mT
    product_BSS: Tensor | None = None
    for left in reversed(range(NEWTON_SCHULZ_STEPS)):
        factor_BSS = torch.baddbmm(gram_BSS, gram_BSS, gram_BSS, beta=b, alpha=c)
        factor_BSS.diagonal(dim1=-2, dim2=-1).add_(a)
        product_BSS = factor_BSS if product_BSS is None else factor_BSS @ product_BSS
        if left:
            gram_BSS = factor_BSS @ gram_BSS @ factor_BSS
    assert product_BSS is not None, "there is at least one step"
    found_BSL = torch.bmm(product_BSS, found_BSL)
    return found_BSL.mT if is_tall else found_BSL


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices [R, C] or [B, R, C] with all singular values brought near 1 by a Newton-Schulz
    iteration.

    It uses bf16 on a GPU, because the iteration tolerates its errors. On a CPU, where bf16 is slower, it uses
    float32.
    """
    a, b, c = NEWTON_SCHULZ
    multiply_add = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    found = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
    is_tall = found.shape[-2] > found.shape[-1]
    found = found.mT if is_tall else found
    found = found / torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = found @ found.mT
        found = multiply_add(found, multiply_add(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if is_tall else found).to(matrices.dtype)
