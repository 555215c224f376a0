"""From a direction to a step of whole units: what all sign methods end with."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.fixed_point import learning_rate_units
from swarmnet.layout import Layout
from swarmnet.manifest import Sync, learning_rate


def signed_step(direction: Tensor, layout: Layout, sync: Sync, round: int) -> Tensor:
    """int32 [layout.size]: one learning rate of `round` against the sign of `direction` (any number type);
    0 where it is 0, and in the padding."""
    step = torch.sign(direction).to(torch.int32)
    step.mul_(-learning_rate_units(learning_rate(sync, round)))
    for start, stop in layout.padding:
        step[start:stop] = 0
    return step
