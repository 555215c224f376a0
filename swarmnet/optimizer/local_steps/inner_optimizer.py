"""The optimizer of local steps: Muon for the matrices of layers, AdamW for all other parameters.

Its state is private to the peer. It is kept in bfloat16 between two steps, and in host memory if requested. A
step changes a flat vector in place, by the gradient in another. Weights are not read, so the vector may be a
delta instead of weights. There is no weight decay.

Shapes: P numbers of the flat vector, B matrices of one shape, R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Entry, Layout
from swarmnet.model.parameters import trains_with_muon
from swarmnet.optimizer.device_groups.device_group import ALONE, DeviceGroup
from swarmnet.optimizer.polar_factor import BATCH_NUMBERS, matrix_batches, orthogonal
from swarmnet.run.local_step_config import InnerOptimizerName
from swarmnet.run.method_config import MUON_RMS

ADAM_DECAYS = (0.9, 0.95)
"""Decay of gradient and square, as for language models (arXiv:2005.14165, appendix B)."""
ADAM_EPSILON = 1e-8
"""arXiv:1412.6980, algorithm 1."""
PIECE_NUMBERS = 1 << 18
"""Numbers of a parameter that AdamW updates at once on a CPU. Its updates are elementwise, and an embedding
table is large. In float32 they are 1 MiB, as a tile of `swarmnet/optimizer/tiling.py`. A GPU uses
`BATCH_NUMBERS`."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter, or a piece of it, for an update rule. All tensors have one shape; `moved` and `moments`
    are changed in place."""

    entry: Entry
    moved: Tensor
    gradient: Tensor
    moments: Sequence[Tensor]

    def pieces(self, numbers: int) -> Iterator[_Parameter]:
        """Yield views of at most `numbers` numbers."""
        moved, gradient = self.moved.view(-1), self.gradient.view(-1)
        moments = [each.view(-1) for each in self.moments]
        for start in range(0, moved.numel(), numbers):
            piece = slice(start, start + numbers)
            yield _Parameter(self.entry, moved[piece], gradient[piece], [each[piece] for each in moments])

    def at_work(self, gain: float) -> _Parameter:
        """Return the parameter with its moments, and its gradient times `gain`, as float32 copies on its
        device."""
        moments = [each.to(self.moved.device, torch.float32) for each in self.moments]
        return replace(self, gradient=self.gradient.float() * gain, moments=moments)


class _Rule(Protocol):
    """An update rule for parameters of one shape."""

    moments: int
    """Number of moments per parameter."""

    def __call__(self, parameters: Sequence[_Parameter], rate: float) -> None: ...


class InnerOptimizer:
    """The local optimizer of one peer and one stage."""

    def __init__(self, name: InnerOptimizerName, layout: Layout, momentum: float) -> None:
        self._name = name
        self._layout = layout
        self._momentum = momentum
        self.use_device_group(ALONE)
        self.moments_lie_on: torch.device | None = None
        """Device of the moments; None: that of the gradient."""
        self._kept: dict[str, list[Tensor]] = {}
        """Maps a parameter's name to its moments."""

    def use_device_group(self, company: DeviceGroup) -> None:
        """Use collectives of several devices. Each device may have a shard of a parameter, but matrices are
        orthogonalized as a whole."""
        self._company = company
        self._muon = _Muon(self._momentum, company)
        self._adamw = _AdamW()

    def step(self, moved_P: Tensor, gradient_P: Tensor, gains: Mapping[str, float], rate: float) -> None:
        """Update `moved_P` by a gradient times each block's gain. A rate of 0 only updates the moments."""
        self._adamw.steps += 1
        for rule, entries in self._batches(gradient_P.device):
            parameters = [
                _Parameter(
                    entry,
                    moved_P[entry.place].view(entry.shape),
                    gradient_P[entry.place].view(entry.shape),
                    self._moments(entry, rule, gradient_P.device),
                )
                for entry in entries
            ]
            for some in self._at_once(rule, parameters):
                taken = [each.at_work(gains[each.entry.block]) for each in some]
                rule(taken, rate)
                for old, new in zip(some, taken, strict=True):
                    for kept, moment in zip(old.moments, new.moments, strict=True):
                        kept.copy_(moment)

    def _at_once(self, rule: _Rule, parameters: Sequence[_Parameter]) -> Iterator[Sequence[_Parameter]]:
        """Yield the parameters, or pieces of them, that are updated together."""
        if rule is self._muon:
            yield parameters
            return
        on_gpu = parameters[0].moved.device.type != "cpu"
        for each in parameters:
            yield from ((piece,) for piece in each.pieces(BATCH_NUMBERS if on_gpu else PIECE_NUMBERS))

    def _moments(self, entry: Entry, rule: _Rule, device: torch.device) -> list[Tensor]:
        """Return the moments of a parameter; zero at first."""
        if entry.name not in self._kept:
            where = self.moments_lie_on or device
            empty = torch.zeros(rule.moments, *entry.shape, dtype=torch.bfloat16, device=where)
            self._kept[entry.name] = list(empty)
        return self._kept[entry.name]

    def _batches(self, device: torch.device) -> Iterator[tuple[_Rule, Sequence[Entry]]]:
        """Yield batches with their rule: single parameters on a CPU (cache); matrices of a shape on a GPU."""
        for entry in self._layout.entries:
            if not self._is_muons(entry):
                yield self._adamw, (entry,)
        matrices = [entry for entry in self._layout.entries if self._is_muons(entry)]
        if device.type == "cpu":
            yield from ((self._muon, (entry,)) for entry in matrices)
            return
        yield from ((self._muon, batch) for batch in matrix_batches(matrices, device, self._company))

    def _is_muons(self, entry: Entry) -> bool:
        return self._name == "muon" and trains_with_muon(entry.name, self._company.shape(entry))


class _AdamW:
    """Adam without weight decay (arXiv:1412.6980, algorithm 1)."""

    moments = 2

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, parameters: Sequence[_Parameter], rate: float) -> None:
        first, second = ADAM_DECAYS
        for each in parameters:
            mean, square = each.moments
            mean.lerp_(each.gradient, 1 - first)
            square.mul_(second).addcmul_(each.gradient, each.gradient, value=1 - second)
            size = (square / (1 - second**self.steps)).sqrt_().add_(ADAM_EPSILON)
            each.moved.addcdiv_(mean, size, value=-rate / (1 - first**self.steps))


class _Muon:
    """Nesterov momentum, orthogonalized (Keller Jordan 2024)."""

    moments = 1

    def __init__(self, momentum: float, company: DeviceGroup) -> None:
        self._decay = momentum
        self._company = company

    def __call__(self, parameters: Sequence[_Parameter], rate: float) -> None:
        wholes = []
        for each in parameters:
            (momentum,) = each.moments
            momentum.lerp_(each.gradient, 1 - self._decay)
            wholes.append(self._company.whole(each.entry, each.gradient.lerp(momentum, self._decay)))
        updates = orthogonal(torch.stack(wholes)) if len(wholes) > 1 else [orthogonal(wholes[0])]
        for each, update_RC in zip(parameters, updates, strict=True):
            size = -rate * MUON_RMS * sqrt(max(update_RC.shape))
            each.moved.add_(self._company.part(each.entry, update_RC), alpha=size)
