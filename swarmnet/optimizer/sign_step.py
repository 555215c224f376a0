"""From a direction to a step of whole units: what all sign methods end with."""

from __future__ import annotations

from torch import Tensor

from swarmnet.model.fixed_point import learning_rate_units
from swarmnet.model.flat_layout import Layout
from swarmnet.model.parameters import branch_share
from swarmnet.run.manifest import Manifest, learning_rate
from swarmnet.run.rates import WHOLE, scaled


def signed_step(
    signs: Tensor, layout: Layout, manifest: Manifest, round: int, factor: int = WHOLE
) -> Tensor:
    """Turn int32 [layout.size] signs (-1, 0, 1) of a direction into the step of `round` against it, in place:
    a learning rate each, times the parameter's share (branch_share) and the thousandths of `factor` that the
    run's owner ordered (run/rates.py), and 0 in the padding. Returns its argument."""
    rate = learning_rate(manifest.sync, round)
    for entry in layout.entries:
        units = scaled(learning_rate_units(rate * branch_share(manifest.model, entry.name)), factor)
        signs[entry.offset : entry.offset + entry.size].mul_(-units)
    for start, stop in layout.padding:
        signs[start:stop] = 0
    return signs
