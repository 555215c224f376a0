"""What all methods are to the bench, the optimizers that everybody knows, and the mean gradient they step by.

Shape suffixes: P numbers of the flat vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from peers.lab.bench.learning.ground import Ground, Parameter
from swarmnet.model.parameters import is_muons
from swarmnet.run.local_steps import InnerOptimizerName
from swarmnet.run.manifest import Sync, learning_rate

WARMUP_SHARE = 0.02
"""Of the steps: linear to the peak, for every method."""
FINAL_RATIO = 0.1
"""Of the peak, at the end of a cosine. As DeMo's own runs (arXiv:2411.19870, section 4)."""
CLIP = 1.0
"""Largest 2-norm of a gradient that an inner optimizer is given (the same section)."""
FLOAT_BYTES = 4

Rate = Callable[[int], float]
"""Learning rate of a step."""


class Learner(Protocol):
    """W peers that learn together by one method."""

    @property
    def sent_bytes(self) -> int:
        """Contributions that one peer has sent so far, once each."""

    def step(self, number: int) -> float:
        """Every peer computes one microbatch, its `number`-th; the mean of their losses, nats per token."""

    def weights(self) -> Tensor:
        """float32 [P]: what the method would hand to whoever takes the model home."""


def schedule(peak: float, steps: int) -> Rate:
    """Linear warm-up, then a cosine: the product's own."""
    return partial(learning_rate, scheduled(Sync(), peak, steps))


def scheduled(sync: Sync, peak: float, steps: int) -> Sync:
    """A method with the schedule that all methods have here."""
    return replace(
        sync, learning_rate=peak, warmup_rounds=max(1, round(WARMUP_SHARE * steps)), decay_rounds=steps,
        min_lr_ratio=FINAL_RATIO,
    )  # fmt: skip


class Inner:
    """AdamW, or Muon for the matrices of the layers and AdamW for the rest, on views of one flat vector.

    Muon as torch has it (Keller Jordan 2024), with updates of the size of AdamW's (arXiv:2502.16982, section
    2.2), so that one rate serves both. No weight decay: it would be one more thing to search.
    """

    def __init__(self, name: InnerOptimizerName, flat_P: Tensor, parameters: Sequence[Parameter]) -> None:
        self._pairs: list[tuple[Tensor, Parameter]] = []
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for each in parameters:
            leaf = each.view(flat_P).detach().requires_grad_()
            self._pairs.append((leaf, each))
            (matrices if name == "muon" and is_muons(each.name, each.shape) else others).append(leaf)
        self._optimizers: list[Optimizer] = [AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
        if matrices:
            self._optimizers.append(Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))

    def step(self, gradient_P: Tensor, rate: float) -> None:
        """Move the flat vector by the mean gradient, which is clipped."""
        norm = float(torch.linalg.vector_norm(gradient_P))
        scale = min(1.0, CLIP / norm) if norm > 0 else 1.0
        for leaf, each in self._pairs:
            leaf.grad = each.view(gradient_P) * scale
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()


class MeanGradient:
    """Every step, all peers send their whole gradient, and all step by the mean: what a data centre does."""

    def __init__(self, ground: Ground, peers: int, inner: InnerOptimizerName, rate: Rate) -> None:
        self._ground, self._peers, self._rate = ground, peers, rate
        self._weights_P = ground.initial_weights()
        self._inner = Inner(inner, self._weights_P, ground.parameters)
        self.sent_bytes = 0

    def step(self, number: int) -> float:
        published_P = self.weights()  # Of their own: the next step writes to the others.
        found = self._ground.gradient_of_all(published_P, self._peers, number)
        self._inner.step(found.summed / found.tokens, self._rate(number))
        self.sent_bytes += FLOAT_BYTES * self._ground.count
        return found.loss

    def weights(self) -> Tensor:
        return self._weights_P.clone()
