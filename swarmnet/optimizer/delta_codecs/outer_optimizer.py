"""The step of a group: the mean delta of its peers, or Nesterov momentum of such means.

    momentum = decay * momentum + mean          step = rate * (mean + decay * momentum)

This is DiLoCo's outer optimizer (arXiv:2311.08105, algorithm 1). It is computed in integer units, with
Nesterov momentum as in torch's SGD, and with rate and decay in thousandths. The momentum is settled as the
weights are. A step is therefore an integer function of the settled state and the round's set, and rounds are
applied in order.

Shapes: C chunks of a plane, M numbers of a chunk that a round covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.run.local_step_config import THOUSAND, LocalStepConfig


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """The outer optimizer of a group."""

    rate: int
    decay: int
    """Both are in thousandths."""

    @classmethod
    def of(cls, how: LocalStepConfig) -> OuterOptimizer:
        return cls(*how.outer_thousandths)

    def step(self, mean_CM: Tensor, momentum_CM: Tensor | None) -> Tensor:
        """Return the step of the weights, int32 [C, M], and update the momentum (same shape) in place. With
        None the momentum is zero and is not kept."""
        if (self.rate, self.decay) == (THOUSAND, 0):
            return mean_CM
        mean = mean_CM.long()
        # Rounded towards zero, so that an unused momentum reaches zero; rounding halves up never would.
        before = torch.zeros_like(mean) if momentum_CM is None else momentum_CM.long()
        momentum = torch.div(self.decay * before, THOUSAND, rounding_mode="trunc") + mean
        if momentum_CM is not None:
            momentum_CM.copy_(momentum)
        whole = THOUSAND * THOUSAND
        step = self.rate * (THOUSAND * mean + self.decay * momentum)
        return torch.div(2 * step + whole, 2 * whole, rounding_mode="floor").to(torch.int32)
