"""The optimizer with which one peer steps by itself: Muon for the matrices of layers, AdamW for all else.

Its state is nobody else's business, and so it is kept in bfloat16 between two steps, and in the host's memory
where that is asked for. It moves a flat vector in place, with the gradient of another; weights
are not read, so the vector may be what a peer moved and not where it stands. No weight decay.

Shapes: P numbers of the flat vector, R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Entry, Layout
from swarmnet.model.parameters import is_muons
from swarmnet.optimizer.divided.company import ALONE, Company
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

    moments: int
    """How many it has."""

    def __call__(self, moved: Tensor, gradient: Tensor, rate: float, moments: Sequence[Tensor]) -> None:
        """All have the parameter's shape; `moments` are changed in place."""


class InnerStep:
    """One peer's optimizer for one stage."""

    def __init__(self, name: InnerName, layout: Layout, momentum: float) -> None:
        self._name, self._layout, self._momentum = name, layout, momentum
        self.divide(ALONE)
        self.moments_lie_on: torch.device | None = None
        """None: where the gradient does."""
        self._kept: dict[str, list[Tensor]] = {}
        """Of each parameter, its moments."""

    def divide(self, company: Company) -> None:
        """Of parameters there may be a part here only; matrices are made orthogonal as wholes."""
        self._company = company
        self._rules: list[tuple[Entry, _Rule]] = [
            (entry, _Muon(self._momentum, entry, company) if self._is_muons(entry, company) else _AdamW())
            for entry in self._layout.entries
        ]

    def begin_afresh(self) -> None:
        """As if no step had been taken."""
        self._kept.clear()
        self.divide(self._company)

    def _is_muons(self, entry: Entry, company: Company) -> bool:
        return self._name == "muon" and is_muons(entry.name, company.shape(entry))

    def step(self, moved_P: Tensor, gradient_P: Tensor, gains: Mapping[str, float], rate: float) -> None:
        """Move by a gradient times the gain of each block. A rate of 0 moves nothing but warms the
        moments."""
        for entry, rule in self._rules:
            gradient = gradient_P[entry.place].view(entry.shape).float() * gains[entry.block]
            if entry.name not in self._kept:
                where = self.moments_lie_on or gradient.device
                empty = torch.zeros(rule.moments, *entry.shape, dtype=torch.bfloat16, device=where)
                self._kept[entry.name] = list(empty)
            kept = self._kept[entry.name]
            moments = [moment.to(gradient.device, torch.float32) for moment in kept]
            rule(moved_P[entry.place].view(entry.shape), gradient, rate, moments)
            for old, new in zip(kept, moments, strict=True):
                old.copy_(new)


class _AdamW:
    """arXiv:1412.6980, algorithm 1."""

    moments = 2

    def __init__(self) -> None:
        self._steps = 0

    def __call__(self, moved: Tensor, gradient: Tensor, rate: float, moments: Sequence[Tensor]) -> None:
        mean, square = moments
        self._steps += 1
        first, second = ADAM_DECAYS
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = (square / (1 - second**self._steps)).sqrt_().add_(ADAM_EPSILON)
        moved.addcdiv_(mean, size, value=-rate / (1 - first**self._steps))


class _Muon:
    """Momentum of Nesterov's kind, made orthogonal (Keller Jordan 2024)."""

    moments = 1

    def __init__(self, momentum: float, entry: Entry, company: Company) -> None:
        self._decay, self._entry, self._company = momentum, entry, company

    def __call__(self, moved: Tensor, gradient: Tensor, rate: float, moments: Sequence[Tensor]) -> None:
        (momentum,) = moments
        momentum.lerp_(gradient, 1 - self._decay)
        update_RC = orthogonal(self._company.whole(self._entry, gradient.lerp(momentum, self._decay)))
        size = -rate * MUON_RMS * sqrt(max(update_RC.shape))
        moved.add_(self._company.part(self._entry, update_RC), alpha=size)


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
