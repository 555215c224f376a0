"""What a group steps by: the mean of what its peers moved, or Nesterov's momentum of such means.

    momentum = decay * momentum + mean          step = rate * (mean + decay * momentum)

is DiLoCo's outer optimizer (arXiv:2311.08105, algorithm 1, as torch's SGD has Nesterov's momentum), in whole
units, with rate and decay in thousandths. The momentum is settled as the weights are, so a step is an integer
function of what was settled before and of the round's set; rounds are taken in their order.

Shapes: C chunks of a plane, M numbers of a chunk that a round speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.run.own_steps import THOUSAND, OwnSteps


@dataclass(frozen=True, slots=True)
class OuterStep:
    rate: int
    decay: int
    """Both in thousandths."""

    @classmethod
    def of(cls, how: OwnSteps) -> OuterStep:
        return cls(*how.outer_thousandths)

    def moved(self, mean_CM: Tensor, momentum_CM: Tensor | None) -> Tensor:
        """int32 [C, M]: what the weights move by; the momentum, int32 of the same shape, is changed in place.
        None: it is at rest, and not kept."""
        if (self.rate, self.decay) == (THOUSAND, 0):
            return mean_CM
        mean = mean_CM.long()
        # Towards zero, so that what is not moved on comes to rest: a half that is rounded up never would.
        before = torch.zeros_like(mean) if momentum_CM is None else momentum_CM.long()
        momentum = torch.div(self.decay * before, THOUSAND, rounding_mode="trunc") + mean
        if momentum_CM is not None:
            momentum_CM.copy_(momentum)
        whole = THOUSAND * THOUSAND
        step = self.rate * (THOUSAND * mean + self.decay * momentum)
        return torch.div(2 * step + whole, 2 * whole, rounding_mode="floor").to(torch.int32)
