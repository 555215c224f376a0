"""From a direction to a step of whole units: what all sign methods end with."""

from __future__ import annotations

from torch import Tensor

from swarmnet.fixed_point import learning_rate_units
from swarmnet.layout import Layout
from swarmnet.manifest import Sync, learning_rate


def signed_step(signs: Tensor, layout: Layout, sync: Sync, round: int) -> Tensor:
    """Turn int32 [layout.size] signs (-1, 0, 1) of a direction into the step of `round` against it, in place:
    one learning rate each, and 0 in the padding. Returns its argument."""
    signs.mul_(-learning_rate_units(learning_rate(sync, round)))
    for start, stop in layout.padding:
        signs[start:stop] = 0
    return signs
