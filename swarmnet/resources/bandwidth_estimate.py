"""Estimate what a peer of a pipeline stage sends and receives per second. It follows from the run's manifest
and the number of tokens that are trained per second. The module does no IO.

There are two kinds of traffic. Hidden states and gradients go between stages (`Crossing`, per microbatch).
Contributions, the compressed updates, go among the peers of one stage; this is the *gossip*. With reducers, a
peer sends slices of its contribution to the peers that sum them, and receives their *results*.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.model.flat_layout import sizes_of, trained_layout
from swarmnet.resources.link_bandwidth import crossings
from swarmnet.run.manifest import Manifest

MONTH_SECONDS = 30 * 86400
SHORTEST_SECONDS = 1e-3
"""Minimum duration of a round; no group is faster."""


@dataclass(frozen=True, slots=True)
class TrafficEstimate:
    """Traffic in bytes per second."""

    sent: float
    received: float


def traffic_of(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> TrafficEstimate:
    """Return the traffic of a peer that trains on `tokens_per_second`, in a stage with `group` peers (it is
    one of them). Hidden states with labels go to the next stage, and gradients to the previous one. Each
    contribution of the group, or with reducers each result, reaches and leaves a peer about once."""
    gossip = gossip_of(manifest, stage, tokens_per_second * group, group)
    microbatches_per_second = tokens_per_second / manifest.microbatch_tokens
    per_microbatch = crossings(manifest)[stage]
    sent = microbatches_per_second * per_microbatch.sent + gossip
    received = microbatches_per_second * per_microbatch.received + gossip
    return TrafficEstimate(sent, received)


def gossip_of(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> float:
    """Return the bytes per second of contributions and results that each peer of a group of `group` peers
    sends. It receives as many. `tokens_per_second` is the rate of the whole group."""
    own_per_second = contributions_per_second(manifest, tokens_per_second, group) / group
    own_bytes = contribution_bytes(manifest, stage) * own_per_second
    if manifest.sync.topology == "sharded-reduce" and group > 1:
        return own_bytes + result_bytes(manifest, stage) * rounds_per_second(manifest, tokens_per_second)
    # Without reducers a peer receives the contribution of each other peer, and passes it on about once.
    return own_bytes * (group - 1)


def rounds_per_second(manifest: Manifest, tokens_per_second: float) -> float:
    """Return the rounds per second of a group that trains on `tokens_per_second`. A round ends when it has
    `global_batch_tokens` or after `max_seconds`, but never without a microbatch."""
    rounds, microbatch = manifest.rounds, manifest.microbatch_tokens
    by_tokens = tokens_per_second / max(rounds.global_batch_tokens, microbatch)
    by_time = 1 / max(rounds.max_seconds, SHORTEST_SECONDS)
    return min(max(by_tokens, by_time), tokens_per_second / microbatch)


def contributions_per_second(manifest: Manifest, tokens_per_second: float, group: int) -> float:
    """Return the contributions per second of all `group` peers of a group, which together train on
    `tokens_per_second`. Each makes at most one per round, and only from at least one microbatch."""
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
    sizes = sizes_of(trained_layout(manifest, stage), manifest.model.experts)
    return manifest.sync.config.contribution_bytes(sizes)


def result_bytes(manifest: Manifest, stage: int) -> float:
    """Estimate the bytes of all results of one round, in a run with reducers."""
    return manifest.sync.config.result_bytes(trained_layout(manifest, stage).size)
