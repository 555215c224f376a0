"""The interface of a method in the learning benchmark, and the baselines AdamW and Muon on the mean gradient.

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
from swarmnet.model.parameters import trains_with_muon
from swarmnet.run.local_step_config import InnerOptimizerName
from swarmnet.run.manifest import learning_rate
from swarmnet.run.schema import Sync

WARMUP_SHARE = 0.02
"""Share of the steps in which the learning rate rises linearly to its peak, for every method."""
FINAL_RATIO = 0.1
"""Learning rate at the end of the cosine, divided by the peak; as in DeMo (arXiv:2411.19870, section 4)."""
CLIP = 1.0
"""Maximum 2-norm of the gradient for an inner optimizer; also from DeMo's section 4."""
FLOAT_BYTES = 4

Rate = Callable[[int], float]
"""Learning rate of a step."""


class Learner(Protocol):
    """Several peers that train one model by one method."""

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of all contributions that one peer has made so far; each counts once."""

    @property
    def vote_weights(self) -> tuple[float, ...]:
        """Return the weight of each peer's votes by agreement, 0 to 1, mean over the rounds so far; empty if
        all votes are equal."""

    def step(self, number: int) -> float:
        """Train each peer on its `number`-th microbatch; return the mean loss in nats per token."""

    def weights(self) -> Tensor:
        """Return the weights that would be exported: float32 [P]."""


def schedule(peak: float, steps: int) -> Rate:
    """Return the product's learning-rate schedule: a linear warm-up, then a cosine."""
    return partial(learning_rate, scheduled(Sync(), peak, steps))


def scheduled(sync: Sync, peak: float, steps: int) -> Sync:
    """Return `sync` with the learning-rate schedule that all methods use in this benchmark."""
    return replace(
        sync,
        learning_rate=peak,
        warmup_rounds=max(1, round(WARMUP_SHARE * steps)),
        decay_rounds=steps,
        min_lr_ratio=FINAL_RATIO,
        secure_owners=0,  # Masks cancel exactly, so they change no figure but the bytes.
    )


class Inner:
    """AdamW, or Muon for the matrices of the layers and AdamW for the rest, on views of one flat vector.

    Muon is torch's (Keller Jordan 2024). Its updates are scaled to the size of AdamW's (arXiv:2502.16982,
    section 2.2), so that one learning rate serves both. There is no weight decay, because it would need a
    search of its own.
    """

    def __init__(self, name: InnerOptimizerName, flat_P: Tensor, parameters: Sequence[Parameter]) -> None:
        self._pairs: list[tuple[Tensor, Parameter]] = []
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for each in parameters:
            leaf = each.view(flat_P).detach().requires_grad_()
            self._pairs.append((leaf, each))
            (matrices if name == "muon" and trains_with_muon(each.name, each.shape) else others).append(leaf)
        self._optimizers: list[Optimizer] = [AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
        if matrices:
            self._optimizers.append(Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))

    def step(self, gradient_P: Tensor, rate: float) -> None:
        """Update the flat vector by the mean gradient, clipped to norm `CLIP`."""
        norm = float(torch.linalg.vector_norm(gradient_P))
        scale = min(1.0, CLIP / norm) if norm > 0 else 1.0
        for leaf, each in self._pairs:
            leaf.grad = each.view(gradient_P) * scale
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()


class MeanGradient:
    """Synchronous data parallelism: in each step all peers send their whole gradient and apply the mean."""

    def __init__(self, *, ground: Ground, peers: int, inner: InnerOptimizerName, rate: Rate) -> None:
        self._ground = ground
        self._peers = peers
        self._rate = rate
        self._weights_P = ground.initial_weights()
        self._inner = Inner(inner, self._weights_P, ground.parameters)
        self.sent_bytes = 0
        self.vote_weights: tuple[float, ...] = ()

    def step(self, number: int) -> float:
        published_P = self.weights()  # A copy, because the step below writes to the weights.
        found = self._ground.gradient_of_all(published_P, self._peers, number)
        self._inner.step(found.summed / found.tokens, self._rate(number))
        self.sent_bytes += FLOAT_BYTES * self._ground.count
        return found.loss

    def weights(self) -> Tensor:
        return self._weights_P.clone()
