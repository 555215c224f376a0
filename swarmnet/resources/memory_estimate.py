"""How much memory a stage takes, from the manifest alone: said before anything is fetched.

The terms are the tensors that a worker holds (swarmnet/optimizer/replica.py, model/stage_compute.py and the
methods), in bytes per parameter; `swarmnet bench memory` measures them (docs/benchmarks/memory.md). Snapshots
for newcomers lie on the disk. No IO.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from swarmnet.model.flat_layout import Layout, layout_of
from swarmnet.model.parameters import is_muons, parameter_shapes
from swarmnet.pipeline.flow_control import graph_bytes
from swarmnet.run.manifest import Manifest
from swarmnet.run.own_steps import InnerName

FLOAT_BYTES = 4
HELD_BYTES = 4 * FLOAT_BYTES
"""Per parameter: settled weights, those that are computed with, the gradient, momentum or what was not
sent."""
AT_WORK_BYTES = 6
"""Per parameter, more at times: gradients of the microbatch at hand 4, or a step being made 5 to 6."""
COPY_BYTES = 2 * FLOAT_BYTES
"""Per parameter: a checkpoint on its way to the disk, a copy of the weights and its floats."""
FREED_BYTES = FLOAT_BYTES
"""Per parameter: freed and not handed back yet, for vectors come and go with each round
(docs/volunteer.md)."""
OLD_VERSION_BYTES = FLOAT_BYTES
"""Per parameter: weights that a microbatch under way was begun with, where it waits for other stages."""
MOMENTUM_BYTES = 2 * FLOAT_BYTES
"""Per parameter, where the group has a momentum: the settled one, and a copy for open rounds."""
SIGN_BYTES = 1
"""Per parameter and open round that was applied: what it did, a sign each."""
ROUNDS_BESIDES = 2
"""Rounds open besides the window's: the one under way and the one that settles next."""
PROCESS_BYTES = 330_000_000
"""Python and torch without a stage: 303 to 313 MB were resident in a paused peer (docs/volunteer.md)."""
DAEMON_BYTES = 160_000_000
"""p2pd at its highest, as protocols/daemon/p2pd.py limits it."""


@dataclass(frozen=True, slots=True)
class Needs:
    """In bytes."""

    stage: int
    weights: int
    """Whatever is kept whether or not anything is computed."""
    graph: int
    """Each microbatch under way, besides."""
    process: int
    """Programs and libraries."""

    @property
    def least(self) -> int:
        """With one microbatch at a time."""
        return self.process + self.weights + self.graph

    def graphs_within(self, limit: int) -> int:
        """How many microbatches fit below a limit; 0: not even one."""
        return max(0, (limit - self.process - self.weights) // self.graph)


def needs_of(manifest: Manifest, stage: int, process_bytes: int) -> Needs:
    """`process_bytes`: what everything else takes out of the same memory; 0: the stage lies in that of a
    card, where no copy for the disk is."""
    layout = layout_of(parameter_shapes(manifest.model, manifest.span(stage)))
    each = HELD_BYTES + AT_WORK_BYTES + FREED_BYTES + (COPY_BYTES if process_bytes else 0)
    each += OLD_VERSION_BYTES if len(manifest.stages) > 1 else 0
    rounds, sync = manifest.rounds.window + ROUNDS_BESIDES, manifest.sync
    own = sync.own_steps
    if own is None:
        weights = layout.size * (each + SIGN_BYTES * rounds)
    else:
        each += FLOAT_BYTES * (own.rest == "feedback")
        each += MOMENTUM_BYTES * own.settles_momentum
        weights = layout.size * each + ceil(layout.size * FLOAT_BYTES * rounds / own.parts)
        weights += _moments(own.inner, layout)
    return Needs(stage, weights, graph_bytes(manifest, stage), process_bytes)


def _moments(inner: InnerName, layout: Layout) -> int:
    """Bytes of an optimizer of a peer's own: Muon's one, AdamW's two."""
    matrices = sum(entry.size for entry in layout.entries if is_muons(entry.name, entry.shape))
    muons = matrices if inner == "muon" else 0
    return FLOAT_BYTES * (muons + 2 * (layout.parameters - muons))
