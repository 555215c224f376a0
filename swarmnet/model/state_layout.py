"""Lay out the whole state of a group: trained weights, then its outer momentum or its agreement ledger if it
has one, then frozen weights.

A group consists of the peers of one stage. A *layout* says where each parameter lies in one flat vector of
int32 (`flat_layout.py`). One vector with one digest holds the whole state. Snapshots, checkpoints and
archives therefore contain all of it without special treatment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from swarmnet.model.decoder import drawn_units
from swarmnet.model.fixed_point import to_units
from swarmnet.model.flat_layout import Entry, Layout, frozen_layout, trained_layout
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

MOMENTUM = "outer_momentum."
"""Prefix of a parameter's name."""
LEDGER = "agreement_ledger"
"""Name under which the agreement ledger is in the state (`optimizer/agreement/ledger.py`)."""
LEDGER_ROWS, LEDGER_FIELDS = 1024, 10
"""Contributors that the ledger knows: more than a round can have. It takes 40 KB."""
BESIDE_WEIGHTS = (MOMENTUM, LEDGER)
"""Prefixes of what is in the state besides weights."""


def state_of(layout: Layout, sync: Sync) -> Layout:
    """Return the layout of what the rounds of a stage change: the trained weights of `layout`. If the run
    settles the outer momentum too, it follows them, with the same layout. The same holds for the agreement
    ledger."""
    if not sync.settles_momentum:
        return behind(layout, ledger_layout(sync))
    momentum_entries = tuple(
        replace(entry, name=MOMENTUM + entry.name, block=MOMENTUM + entry.block) for entry in layout.entries
    )
    return behind(layout, replace(layout, entries=momentum_entries))


def ledger_layout(sync: Sync) -> Layout:
    """Return the layout of the agreement ledger; empty if the run has none."""
    if not sync.config.weighs_by_agreement:
        return Layout((), (), (), 0)
    ledger = Entry(LEDGER, (LEDGER_ROWS, LEDGER_FIELDS), 0, LEDGER)
    return Layout((ledger,), (), (), ledger.size)


def behind(first: Layout, second: Layout) -> Layout:
    """Return the layout of one vector that holds `first` and behind it `second`."""
    if not second.size:
        return first
    size = first.size
    entries = (*first.entries, *(replace(entry, offset=size + entry.offset) for entry in second.entries))
    planes = (*first.planes, *(replace(plane, offset=size + plane.offset) for plane in second.planes))
    padding = (*first.padding, *((size + start, size + stop) for start, stop in second.padding))
    return Layout(entries, planes, padding, size + second.size)


def state_layout(manifest: Manifest, stage: int) -> Layout:
    settled = state_of(trained_layout(manifest, stage), manifest.sync)
    return behind(settled, frozen_layout(manifest, stage))


def with_zero_momentum(units: Tensor, state: Layout) -> Tensor:
    """Return int32 [state.size]: weights int32 [layout.size], then zeros for momentum or ledger."""
    return torch.cat([units, units.new_zeros(state.size - len(units))])


def first_state(
    manifest: Manifest, stage: int, given: Callable[[str], Tensor | None] = lambda name: None
) -> Tensor:
    """Return the state of a stage before any round: int32 [state_layout.size]. All but weights is zero.
    `given` returns a parameter's first values in floats, of its shape; None lets the run's seed draw them."""
    state = state_layout(manifest, stage)
    units = torch.zeros(state.size, dtype=torch.int32)
    for entry in state.entries:
        if entry.name.startswith(BESIDE_WEIGHTS):
            continue
        first_values = given(entry.name)
        if first_values is None:
            units[entry.place] = drawn_units(manifest.model, entry.name, entry.shape, manifest.seed)
        else:
            units[entry.place] = to_units(first_values.flatten())
    return units
