"""Estimate what a peer of a pipeline stage sends and receives per second. It follows from the run's manifest
and the number of tokens that are trained per second. The module does no IO.

There are two kinds of traffic. Hidden states and gradients go between stages (`Crossing`, per microbatch).
Contributions, the compressed updates, go among the peers of one stage; this is the *gossip*. With reducers, a
peer sends slices of its contribution to the peers that sum them, and receives their *results*.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from swarmnet.model.flat_layout import trained_layout, trained_part
from swarmnet.model.parameters import trains_with_muon
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
    it. Hidden states with labels go to the next stage, and gradients to the previous one. Each contribution
    of the group, or with reducers each result, reaches and leaves a peer about once."""
    gossip = gossip_of(manifest, stage, tokens_per_second * group, group)
    microbatches_per_second = tokens_per_second / manifest.microbatch_tokens
    each = crossings(manifest)[stage]
    return TrafficEstimate(
        microbatches_per_second * each.sent + gossip, microbatches_per_second * each.received + gossip
    )


def gossip_of(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> float:
    """Return the bytes per second of contributions and results that a peer of a group sends, and receives.
    `tokens_per_second` is of the whole group."""
    own_contributions = contributions_per_second(manifest, tokens_per_second, group) / group
    own_bytes = contribution_bytes(manifest, stage) * own_contributions
    if manifest.sync.topology == "sharded-reduce" and group > 1:
        return own_bytes + result_bytes(manifest, stage) * rounds_per_second(manifest, tokens_per_second)
    return own_bytes * (group - 1)  # A peer passes on the contributions of the others, about once.


def rounds_per_second(manifest: Manifest, tokens_per_second: float) -> float:
    """Return the rounds per second of a group that commits `tokens_per_second`. A round ends with its target
    of tokens or after `max_seconds`, but never without a microbatch."""
    rounds, microbatch = manifest.rounds, manifest.microbatch_tokens
    by_tokens = tokens_per_second / max(rounds.global_batch_tokens, microbatch)
    by_time = 1 / max(rounds.max_seconds, SHORTEST_SECONDS)
    return min(max(by_tokens, by_time), tokens_per_second / microbatch)


def contributions_per_second(manifest: Manifest, tokens_per_second: float, group: int) -> float:
    """Return the contributions per second of a group of `group` peers that commits `tokens_per_second`. Each
    peer makes at most one per round, and none without a microbatch in the round."""
    microbatches = tokens_per_second / manifest.microbatch_tokens
    return min(group * rounds_per_second(manifest, tokens_per_second), microbatches)


def gossip_per_peer(manifest: Manifest) -> float:
    """Return the bytes per second that one more peer of a group adds to the link of each other peer, in the
    stage with the largest contribution. Rounds are assumed to take `max_seconds`. It is 0 with reducers,
    whose results do not grow with the group."""
    if manifest.sync.topology == "sharded-reduce":
        return 0.0
    largest = max(contribution_bytes(manifest, stage) for stage in range(len(manifest.stages)))
    return largest / max(manifest.rounds.max_seconds, SHORTEST_SECONDS)


def contribution_bytes(manifest: Manifest, stage: int) -> float:
    """Estimate the bytes of one contribution. With local-step methods it is an encoded weight delta. With
    others it has the largest coefficients of each chunk, and the directions of low-rank methods."""
    sync = manifest.sync
    layout = trained_part(trained_layout(manifest, stage), manifest.model.experts)
    parameters = layout.size
    local_steps = sync.local_steps
    if local_steps is not None:
        if local_steps.delta_codec == "topk-2bit":
            # Per value an index, a sign and which of two sizes; per chunk the two sizes (8 bytes).
            kept = max(1, sync.sparse_topk // local_steps.fragments)
            return parameters / CHUNK * (kept * (4 + log2(CHUNK / sync.sparse_topk)) / 8 + 8)
        return parameters / local_steps.fragments * BITS[local_steps.delta_codec] / 8 + parameters / CHUNK
    direction_bytes = 0
    if sync.method in ("low-rank", "hybrid"):  # A byte for each number of the directions.
        matrices = [entry for entry in layout.entries if trains_with_muon(entry.name, entry.shape)]
        direction_bytes = sum(min(entry.shape) * min(sync.rank, *entry.shape) for entry in matrices)
        if sync.method == "low-rank":  # Only the other parameters are sent as coefficients.
            parameters -= sum(entry.size for entry in matrices)
    index_bits = {"group": log2(CHUNK / sync.topk_per_chunk), "top-k": log2(CHUNK)}[sync.selection]
    value_bits = 32 if sync.method == "demo" else 1
    return direction_bytes + parameters / CHUNK * sync.topk_per_chunk * (value_bits + index_bits) / 8


def result_bytes(manifest: Manifest, stage: int) -> float:
    """Estimate the bytes of all results of one round, which together cover a fragment of the stage. Reducers
    work with local-step methods only."""
    local_steps, size = manifest.sync.local_steps, trained_layout(manifest, stage).size
    assert local_steps is not None, "only own steps go through reducers"
    return size / local_steps.fragments * RESULT_BITS / 8 + size / CHUNK
