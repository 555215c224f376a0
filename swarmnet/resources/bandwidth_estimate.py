"""Estimate what a peer of a stage sends and receives, from the manifest and the swarm's pace. The module does
no IO."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from swarmnet.model.flat_layout import held_part, trained_layout
from swarmnet.model.parameters import is_muons
from swarmnet.resources.link_bandwidth import crossings
from swarmnet.run.local_steps import BITS
from swarmnet.run.manifest import Manifest

CHUNK = 4096
"""Number of coefficients per chunk of a vote contribution (`swarmnet/optimizer/sign_votes.py`)."""
RESULT_BITS = 4
"""Bits per number in a result (`swarmnet/optimizer/local_steps/reduced_steps.py`)."""
MONTH_SECONDS = 30 * 86400
SHORTEST_SECONDS = 1e-3
"""Minimum duration of a round; no group is faster."""


@dataclass(frozen=True, slots=True)
class TrafficEstimate:
    """Traffic in bytes per second."""

    sent: float
    received: float


def traffic_of(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> TrafficEstimate:
    """Return the traffic of a peer that commits `tokens_per_second` in a stage with `group` peers, including
    it. Hidden states with labels go down, and gradients come up. Each contribution reaches and leaves a peer
    about once. With reducers these are each result, and slices that amount to one contribution."""
    gossip = gossip_of(manifest, stage, tokens_per_second * group, group)
    bodies, rate = crossings(manifest)[stage], tokens_per_second / manifest.microbatch_tokens
    return TrafficEstimate(rate * bodies.sent + gossip, rate * bodies.received + gossip)


def gossip_of(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> float:
    """Return the bytes per second of contributions and results that a peer of a group sends, and receives.
    `tokens_per_second` is of the whole group."""
    each = contributions_per_second(manifest, tokens_per_second, group) / group
    if manifest.sync.topology == "sharded-reduce" and group > 1:
        results = result_bytes(manifest, stage) * rounds_per_second(manifest, tokens_per_second)
        return contribution_bytes(manifest, stage) * each + results
    return contribution_bytes(manifest, stage) * each * (group - 1)


def rounds_per_second(manifest: Manifest, tokens_per_second: float) -> float:
    """Return the rounds per second of a group that commits `tokens_per_second`. A round has its target of
    tokens, at least a microbatch, or fewer if its time is up."""
    rounds, microbatch = manifest.rounds, manifest.microbatch_tokens
    by_tokens = tokens_per_second / max(rounds.global_batch_tokens, microbatch)
    by_time = 1 / max(rounds.max_seconds, SHORTEST_SECONDS)
    return min(max(by_tokens, by_time), tokens_per_second / microbatch)


def contributions_per_second(manifest: Manifest, tokens_per_second: float, group: int) -> float:
    """Return the contributions per second of a group that commits `tokens_per_second`. Each peer makes at
    most one per round, and none without a microbatch in the round."""
    microbatches = tokens_per_second / manifest.microbatch_tokens
    return min(group * rounds_per_second(manifest, tokens_per_second), microbatches)


def gossip_per_peer(manifest: Manifest) -> float:
    """Return the bytes per second per link that one more peer of a group adds, in rounds that end by time. It
    is 0 with reducers, whose results do not grow with the group."""
    if manifest.sync.topology == "sharded-reduce":
        return 0.0
    largest = max(contribution_bytes(manifest, stage) for stage in range(len(manifest.stages)))
    return largest / max(manifest.rounds.max_seconds, SHORTEST_SECONDS)


def contribution_bytes(manifest: Manifest, stage: int) -> float:
    """Estimate the bytes of one contribution."""
    sync = manifest.sync
    layout = held_part(trained_layout(manifest, stage), manifest.model.experts)
    parameters = layout.size
    if (own := sync.local_steps) is not None:
        if (
            own.delta_codec == "topk-2bit"
        ):  # Indices, signs, which of two sizes; and the two sizes for each chunk.
            kept = max(1, sync.sparse_topk // own.fragments)
            return parameters / CHUNK * (kept * (4 + log2(CHUNK / sync.sparse_topk)) / 8 + 8)
        return parameters / own.fragments * BITS[own.delta_codec] / 8 + parameters / CHUNK
    direction_bytes = 0
    if sync.method in ("low-rank", "hybrid"):  # A byte for each number of the directions.
        matrices = [entry for entry in layout.entries if is_muons(entry.name, entry.shape)]
        direction_bytes = sum(min(entry.shape) * min(sync.rank, *entry.shape) for entry in matrices)
        parameters -= sum(entry.size for entry in matrices) * (sync.method == "low-rank")
    index_bits = {"group": log2(CHUNK / sync.topk_per_chunk), "top-k": log2(CHUNK)}[sync.selection]
    value_bits = 32 if sync.method == "demo" else 1
    return direction_bytes + parameters / CHUNK * sync.topk_per_chunk * (value_bits + index_bits) / 8


def result_bytes(manifest: Manifest, stage: int) -> float:
    """Estimate the bytes of a round's results if reducers sum and contributions cover the whole stage."""
    own, size = manifest.sync.local_steps, trained_layout(manifest, stage).size
    assert own is not None, "only own steps go through reducers"
    return size / own.fragments * RESULT_BITS / 8 + size / CHUNK
