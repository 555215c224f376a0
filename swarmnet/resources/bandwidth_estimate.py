"""What a peer of a stage sends and receives, from the manifest and the swarm's pace. Estimates; no IO."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from swarmnet.model.flat_layout import held_part, trained_layout
from swarmnet.model.parameters import is_muons
from swarmnet.resources.lines import crossings
from swarmnet.run.manifest import Manifest
from swarmnet.run.own_steps import BITS

CHUNK = 4096
"""Coefficients that the votes of a contribution are counted by (swarmnet/optimizer/sign_votes.py)."""
RESULT_BITS = 4
"""Of a number in a result (swarmnet/optimizer/own_steps/reduced_steps.py)."""
MONTH_SECONDS = 30 * 86400
SHORTEST_SECONDS = 1e-3
"""Of a round: no group goes on faster."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per second."""

    sent: float
    received: float


def traffic_of(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> Traffic:
    """`tokens_per_second`: what this peer commits; `group`: peers of the stage, this one included.

    Hidden states with labels go down, gradients come up; each contribution reaches and leaves a peer about
    once, or each result, and as many slices as one contribution has."""
    gossip = gossip_of(manifest, stage, tokens_per_second * group, group)
    bodies, rate = crossings(manifest)[stage], tokens_per_second / manifest.microbatch_tokens
    return Traffic(rate * bodies.sent + gossip, rate * bodies.received + gossip)


def gossip_of(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> float:
    """Return the bytes per second of contributions and results that a peer of a group sends, and receives.
    `tokens_per_second`: of the whole group."""
    each = contributions_per_second(manifest, tokens_per_second, group) / group
    if manifest.sync.exchange == "sharded" and group > 1:
        results = result_bytes(manifest, stage) * rounds_per_second(manifest, tokens_per_second)
        return contribution_bytes(manifest, stage) * each + results
    return contribution_bytes(manifest, stage) * each * (group - 1)


def rounds_per_second(manifest: Manifest, tokens_per_second: float) -> float:
    """Of a group that commits so many tokens per second. A round has the tokens that it is meant to, at least
    a microbatch, or fewer once its time is up."""
    rounds, microbatch = manifest.rounds, manifest.microbatch_tokens
    by_tokens = tokens_per_second / max(rounds.target_tokens, microbatch)
    by_time = 1 / max(rounds.longest_seconds, SHORTEST_SECONDS)
    return min(max(by_tokens, by_time), tokens_per_second / microbatch)


def contributions_per_second(manifest: Manifest, tokens_per_second: float, group: int) -> float:
    """That a group makes which commits so many tokens per second: one per peer and round at most, and none by
    a peer that had no microbatch in the round."""
    microbatches = tokens_per_second / manifest.microbatch_tokens
    return min(group * rounds_per_second(manifest, tokens_per_second), microbatches)


def gossip_per_peer(manifest: Manifest) -> float:
    """Bytes per second of each line that a further peer of a group takes, in rounds that end by time; 0 where
    reducers add up, whose results do not grow with the group."""
    if manifest.sync.exchange == "sharded":
        return 0.0
    largest = max(contribution_bytes(manifest, stage) for stage in range(len(manifest.stages)))
    return largest / max(manifest.rounds.longest_seconds, SHORTEST_SECONDS)


def contribution_bytes(manifest: Manifest, stage: int) -> float:
    """About what one contribution takes."""
    sync = manifest.sync
    layout = held_part(trained_layout(manifest, stage), manifest.model.experts)
    parameters = layout.size
    if (own := sync.own_steps) is not None:
        if own.sent == "largest":  # Places, signs, which of two sizes; and of each chunk these two.
            kept = max(1, sync.sparse_kept // own.parts)
            return parameters / CHUNK * (kept * (4 + log2(CHUNK / sync.sparse_kept)) / 8 + 8)
        return parameters / own.parts * BITS[own.sent] / 8 + parameters / CHUNK
    told = 0
    if sync.method in ("low-rank", "hybrid"):  # A byte for each number of the directions.
        matrices = [entry for entry in layout.entries if is_muons(entry.name, entry.shape)]
        told = sum(min(entry.shape) * min(sync.rank, *entry.shape) for entry in matrices)
        parameters -= sum(entry.size for entry in matrices) * (sync.method == "low-rank")
    index_bits = {"group": log2(CHUNK / sync.kept), "top-k": log2(CHUNK)}[sync.selection]
    value_bits = 32 if sync.method == "demo-float" else 1
    return told + parameters / CHUNK * sync.kept * (value_bits + index_bits) / 8


def result_bytes(manifest: Manifest, stage: int) -> float:
    """About what the results of a round take, where reducers add up and all of the stage is spoken of."""
    own, size = manifest.sync.own_steps, trained_layout(manifest, stage).size
    assert own is not None, "only own steps go through reducers"
    return size / own.parts * RESULT_BITS / 8 + size / CHUNK
