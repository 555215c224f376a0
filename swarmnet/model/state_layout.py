"""Where what a group holds lies: what it trains; after it, where the group steps with one, its momentum; at
the end what is frozen.

All are int32 on the same grid, one vector, under one digest: so snapshots, checkpoints and archives carry a
momentum and frozen weights without knowing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from swarmnet.model.decoder import drawn_units
from swarmnet.model.fixed_point import to_units
from swarmnet.model.flat_layout import Layout, frozen_layout, trained_layout
from swarmnet.run.manifest import Manifest, Sync

MOMENTUM = "outer_momentum."
"""Goes before a parameter's name."""


def state_of(layout: Layout, sync: Sync) -> Layout:
    """Of what a stage settles whose trained weights lie as `layout` says: the same, or twice as long."""
    if not sync.settles_momentum:
        return layout
    momentum = replace(layout, entries=tuple(
        replace(each, name=MOMENTUM + each.name, block=MOMENTUM + each.block) for each in layout.entries
    ))  # fmt: skip
    return behind(layout, momentum)


def behind(first: Layout, second: Layout) -> Layout:
    """Both in one vector."""
    size = first.size
    return Layout(
        (*first.entries, *(replace(each, offset=size + each.offset) for each in second.entries)),
        (*first.planes, *(replace(plane, offset=size + plane.offset) for plane in second.planes)),
        (*first.padding, *((size + start, size + stop) for start, stop in second.padding)),
        size + second.size,
    )  # fmt: skip


def state_layout(manifest: Manifest, stage: int) -> Layout:
    """Of a stage of the run."""
    settled = state_of(trained_layout(manifest, stage), manifest.sync)
    return behind(settled, frozen_layout(manifest, stage))


def at_rest(units: Tensor, state: Layout) -> Tensor:
    """int32 [state.size]: these weights, int32 [layout.size], and no momentum."""
    return torch.cat([units, units.new_zeros(state.size - len(units))])


def first_state(
    manifest: Manifest, stage: int, given: Callable[[str], Tensor | None] = lambda name: None
) -> Tensor:
    """What a stage holds before any round: int32 [state_layout.size], zero in momentum and padding. `given`:
    the first values of a parameter in floats, of its shape; None: the run's seed draws them."""
    state = state_layout(manifest, stage)
    units = torch.zeros(state.size, dtype=torch.int32)
    for entry in state.entries:
        if entry.name.startswith(MOMENTUM):
            continue
        found = given(entry.name)
        if found is None:
            units[entry.place] = drawn_units(manifest.model, entry.name, entry.shape, manifest.seed)
        else:
            units[entry.place] = to_units(found.flatten())
    return units
