"""What a peer of a stage sends and receives, from the manifest and the swarm's pace. Estimates; no IO."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from swarmnet.bodies import LABEL_BYTES, encoded_bytes
from swarmnet.layout import layout_of
from swarmnet.manifest import Manifest
from swarmnet.parameters import parameter_shapes

CHUNK = 4096
"""Coefficients that the votes of a contribution are counted by (swarmnet/votes.py)."""
MONTH_SECONDS = 30 * 86400


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per second."""

    sent: float
    received: float


def traffic_of(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> Traffic:
    """`tokens_per_second`: what this peer commits; `group`: peers of the stage, this one included.

    Hidden states with labels go down, gradients come up; each contribution reaches and leaves a peer about
    once."""
    gradient = encoded_bytes(manifest.hidden_shape, manifest.hidden_codec) / manifest.microbatch_tokens
    activation = gradient + LABEL_BYTES
    above, below = stage > 0, stage < len(manifest.stages) - 1
    rounds_per_second = tokens_per_second * group / manifest.rounds.target_tokens
    gossip = contribution_bytes(manifest, stage) * rounds_per_second * (group - 1)
    return Traffic(
        tokens_per_second * (activation * below + gradient * above) + gossip,
        tokens_per_second * (activation * above + gradient * below) + gossip,
    )


def contribution_bytes(manifest: Manifest, stage: int) -> float:
    """About what one contribution takes."""
    sync = manifest.sync
    parameters = layout_of(parameter_shapes(manifest.model, manifest.span(stage))).size
    index_bits = {"seeded": 0.0, "group": log2(CHUNK / sync.kept), "top-k": log2(CHUNK)}[sync.selection]
    return parameters / CHUNK * sync.kept * (1 + index_bits) / 8
