"""How much memory a stage takes, from the manifest alone: said before anything is fetched.

The terms are the tensors that a worker holds (swarmnet/optimizer/replica.py, model/stage_compute.py,
optimizer/momentum.py, optimizer/sign_votes.py and peers/state/snapshot_store.py), in bytes per parameter; the
sum lies above what a process was seen to take at its highest (docs/volunteer.md has the figures). No IO.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.pipeline.flow_control import graph_bytes
from swarmnet.run.manifest import Manifest

HELD_BYTES = 44
"""Per parameter: settled and live weights 8, published floats of two versions 8, gradients gathered and
handed over 8, momentum 4, gradients of the microbatch at hand 4, two snapshots 8, a step being made 4."""
OPEN_ROUND_BYTES = 6
"""Per parameter and open round: the tally's sums 2, the step that was applied 4."""
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
    """`process_bytes`: what everything else takes out of the same memory."""
    parameters = layout_of(parameter_shapes(manifest.model, manifest.span(stage))).size
    rounds = manifest.rounds.window + ROUNDS_BESIDES
    weights = parameters * (HELD_BYTES + OPEN_ROUND_BYTES * rounds)
    return Needs(stage, weights, graph_bytes(manifest, stage), process_bytes)
