"""Where what a group settles lies: its weights, and after them, where the group steps with one, its momentum.

Both are int32 on the same grid, one vector, under one digest: so snapshots, checkpoints and archives carry a
momentum without knowing of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Layout, layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.run.manifest import Manifest, Sync

MOMENTUM = "outer_momentum."
"""Goes before a parameter's name."""


def state_of(layout: Layout, sync: Sync) -> Layout:
    """Of a stage whose weights lie as `layout` says: the same, or twice as long."""
    if not sync.settles_momentum:
        return layout
    size, told = layout.size, MOMENTUM
    return Layout(
        (*layout.entries, *(
            replace(each, name=told + each.name, offset=size + each.offset, block=told + each.block)
            for each in layout.entries
        )),
        (*layout.planes, *(replace(plane, offset=size + plane.offset) for plane in layout.planes)),
        (*layout.padding, *((size + start, size + stop) for start, stop in layout.padding)),
        2 * size,
    )  # fmt: skip


def state_layout(manifest: Manifest, stage: int) -> Layout:
    """Of a stage of the run."""
    return state_of(layout_of(parameter_shapes(manifest.model, manifest.span(stage))), manifest.sync)


def at_rest(units: Tensor, state: Layout) -> Tensor:
    """int32 [state.size]: these weights, int32 [layout.size], and no momentum."""
    return torch.cat([units, units.new_zeros(state.size - len(units))])
