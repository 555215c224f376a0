"""The optimizer with which one peer steps by itself: Muon for the matrices of layers, AdamW for all else.

Its state is nobody else's business. It moves a flat vector in place, with the gradient of another; weights
are not read, so the vector may be what a peer moved and not where it stands. No weight decay.

Shapes: P numbers of the flat vector, R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Entry, Layout
from swarmnet.model.parameters import is_muons
from swarmnet.run.own_steps import InnerName

ADAM_DECAYS = (0.9, 0.95)
"""Of gradient and square, as language models are trained (arXiv:2005.14165, appendix B)."""
ADAM_EPSILON = 1e-8
"""arXiv:1412.6980, algorithm 1."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration (Keller Jordan 2024), which takes singular values to 0.7 to
1.2."""
NEWTON_SCHULZ_STEPS = 5
MUON_RMS = 0.2
"""Root mean square of an update of AdamW, which Muon's is made to have, so that one rate serves both
(arXiv:2502.16982, section 2.2)."""
LEAST_NORM = 1e-7
"""Below it a matrix is nothing, and stays nothing."""


class _Rule(Protocol):
    """Moves one parameter."""

    def __call__(self, moved: Tensor, gradient: Tensor, rate: float) -> None:
        """`moved` and `gradient` have the parameter's shape."""


class InnerStep:
    """One peer's optimizer for one stage."""

    def __init__(self, name: InnerName, layout: Layout, momentum: float) -> None:
        self._rules: list[tuple[Entry, _Rule]] = [
            (entry, _Muon(momentum) if name == "muon" and is_muons(entry.name, entry.shape) else _AdamW())
            for entry in layout.entries
        ]

    def step(self, moved_P: Tensor, gradient_P: Tensor, gains: Mapping[str, float], rate: float) -> None:
        """Move by a gradient times the gain of each block. A rate of 0 moves nothing but warms the
        moments."""
        for entry, rule in self._rules:
            place = slice(entry.offset, entry.offset + entry.size)
            gradient = gradient_P[place].view(entry.shape) * gains[entry.block]
            rule(moved_P[place].view(entry.shape), gradient, rate)


class _AdamW:
    """arXiv:1412.6980, algorithm 1."""

    def __init__(self) -> None:
        self._mean: Tensor | None = None
        self._square: Tensor | None = None
        self._steps = 0

    def __call__(self, moved: Tensor, gradient: Tensor, rate: float) -> None:
        if self._mean is None or self._square is None:
            self._mean, self._square = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self._steps += 1
        first, second = ADAM_DECAYS
        self._mean.lerp_(gradient, 1 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = (self._square / (1 - second**self._steps)).sqrt_().add_(ADAM_EPSILON)
        moved.addcdiv_(self._mean, size, value=-rate / (1 - first**self._steps))


class _Muon:
    """Momentum of Nesterov's kind, made orthogonal (Keller Jordan 2024)."""

    def __init__(self, momentum: float) -> None:
        self._decay = momentum
        self._momentum_RC: Tensor | None = None

    def __call__(self, moved: Tensor, gradient: Tensor, rate: float) -> None:
        if self._momentum_RC is None:
            self._momentum_RC = torch.zeros_like(gradient)
        self._momentum_RC.lerp_(gradient, 1 - self._decay)
        update_RC = orthogonal(gradient.lerp(self._momentum_RC, self._decay))
        moved.add_(update_RC, alpha=-rate * MUON_RMS * sqrt(max(update_RC.shape)))


def orthogonal(matrix_RC: Tensor) -> Tensor:
    """The matrix with all its singular values near 1, by Newton and Schulz's iteration. On a GPU in bf16,
    whose errors the iteration forgives; on a CPU, where that is slower, in float32."""
    a, b, c = NEWTON_SCHULZ
    found = matrix_RC if matrix_RC.device.type == "cpu" else matrix_RC.bfloat16()
    is_tall = found.shape[0] > found.shape[1]
    found = found.T if is_tall else found
    found = found / found.norm().clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.T if is_tall else found).to(matrix_RC.dtype)
