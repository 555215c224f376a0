"""What peers say of what they learned: bytes of a round on each peer's line, and what it takes of memory.

A run says how its peers exchange what they learned. `exchange_of` reads that from the manifest, and is the
only place that does: whatever manifests come to name besides is read there. The lines that bodies of
microbatches travel on carry contributions first (`charged`): every peer of a group must receive every round
to be in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from peers.lab.planner.layout import SwarmLayout
from peers.lab.processes.demo_report import contribution_bytes
from protocols.framing.frames import wire_bytes
from protocols.messages.table import Contribution, encode
from protocols.signed.envelope import ENVELOPE_BYTES
from swarmnet.model.computing.choices import Computing
from swarmnet.model.flat_layout import trained_layout
from swarmnet.optimizer.local_steps.reduced_steps import ReducedSteps
from swarmnet.optimizer.method import method_of
from swarmnet.pipeline.flow_control import graph_bytes
from swarmnet.resources.bandwidth_estimate import rounds_per_second
from swarmnet.resources.memory_estimate import needs_of
from swarmnet.run.manifest import Manifest, TopologyName

RESULT_CONTRIBUTIONS = 4.0
"""Bytes of a round's results in those of a contribution: four bits a number where it has one
(swarmnet/optimizer/local_steps/reduced_steps.py), and of all that the stage has. With groups of experts a
contribution speaks of less, and `result_bytes` is exact."""
ALONE_BYTES = 16
"""Memory per parameter of somebody who trains alone: weights, gradient and two moments, 4 each."""
MAX_OF_A_LINE = 0.9
"""That contributions can fill: packets' headers take 4 %, beats and repeated packets have to find room."""
STEPS = 40
"""Of bisection."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """How a group exchanges what its peers learned."""

    contribution: tuple[float, ...]
    """Bytes of one, by stage."""
    results: tuple[float, ...]
    """Bytes of all results of a round, by stage, where reducers add up; empty where they cannot."""
    carried: TopologyName = "all-gather"
    """everyone: each receives the contribution of each; sharded: each sends one contribution in slices to
    reducers, who add up, and the sums go to all, whatever the size of the group."""
    inner_batch_tokens: int = 0
    """A peer has something to contribute after so many of its own; 0: after a microbatch."""

    def contributions(self, manifest: Manifest, tokens_per_second: float, group: int) -> float:
        """Per second, that a group makes which commits so many tokens: at most one per peer and round, and
        none by a peer that had not enough of the round."""
        step = max(self.inner_batch_tokens, manifest.microbatch_tokens)
        return min(group * rounds_per_second(manifest, tokens_per_second), tokens_per_second / step)

    def per_second(self, manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> float:
        """Bytes on each peer's line, up and down alike. Whatever way contributions take, what all receive
        somebody has sent."""
        rounds = rounds_per_second(manifest, tokens_per_second)
        made = self.contributions(manifest, tokens_per_second, group)
        return self._bytes(stage, group, made, rounds)

    def per_round(self, stage: int, group: int) -> float:
        """Bytes on each peer's line of a round that all contribute to."""
        return self._bytes(stage, group, group, 1)

    def _bytes(self, stage: int, group: int, made: float, rounds: float) -> float:
        if group < 2:
            return 0.0
        if self.carried == "all-gather":
            return made * (group - 1) / group * self.contribution[stage]
        return made / group * self.contribution[stage] + rounds * self.results[stage]

    def memory(self, manifest: Manifest, stage: int) -> int:
        """Bytes of its card that a peer of that stage needs, with one microbatch at a time."""
        return needs_of(manifest, stage, 0, CARD).least


CARD = Computing(dtype="bf16")
"""How peers compute whose memory is that of a card, unless their files say otherwise."""


def exchange_of(manifest: Manifest) -> Exchange:
    """As the run says."""
    sync, own, stages = manifest.sync, manifest.sync.local_steps, range(len(manifest.stages))
    step = (sync.inner_batch_tokens or manifest.microbatch_tokens) if own is not None else 0
    can_shard = own is not None and own.delta_codec != "topk-2bit"
    return Exchange(
        tuple(contribution_bytes(manifest, stage) for stage in stages),
        tuple(result_bytes(manifest, stage) for stage in stages) if can_shard else (),
        sync.topology, step,
    )  # fmt: skip


def result_bytes(manifest: Manifest, stage: int) -> int:
    """On the wire of all results of a round in which all of the stage is spoken of, if reducers added up:
    their tables apart, which are a few dozen bytes for each contributor."""
    sharded = replace(manifest, sync=replace(manifest.sync, topology="sharded-reduce"))
    reduced = method_of(sharded, trained_layout(manifest, stage), "meta").reduced
    assert isinstance(reduced, ReducedSteps), "what own steps tell goes through reducers"
    return wire_bytes(len(encode(Contribution())), ENVELOPE_BYTES + reduced.number_bytes)


def parameters_of(manifest: Manifest, stage: int) -> int:
    return trained_layout(manifest, stage).size


def alone_memory(manifest: Manifest) -> int:
    """Bytes that somebody needs who trains the whole model without anybody, a sequence at a time."""
    data = replace(manifest.data, micro_batch_size=1)
    whole = replace(manifest, stages=(manifest.model.num_hidden_layers,), data=data)
    return ALONE_BYTES * parameters_of(whole, 0) + graph_bytes(whole, 0)


def charged(
    layout: SwarmLayout,
    most: Callable[[SwarmLayout], float],
    taken: Callable[[float], Sequence[float]],
) -> tuple[SwarmLayout, float]:
    """The layout with what contributions take of its lines, and the rate that is left: the largest at which
    lines carry its contributions and its bodies. `most(layout)`: microbatches per second that the rest of the
    lines and compute bear; `taken(rate)`: bytes per second on the lines of each stage's peers."""
    slowest = [
        min(min(layout.peers[place].up, layout.peers[place].down) for place in places)
        for places in layout.stages()
    ]

    def charge(rate: float) -> SwarmLayout:
        return replace(layout, taken=tuple(taken(rate)))

    def bears(rate: float) -> bool:
        tried = charge(rate)
        if any(took > MAX_OF_A_LINE * line for took, line in zip(tried.taken, slowest, strict=True)):
            return False
        return most(tried) >= rate * (1 - 1e-9)

    rate = largest(most(layout), bears)
    return charge(rate), rate


def largest(high: float, is_borne: Callable[[float], bool]) -> float:
    """The largest rate up to `high` that is borne, where with each one all smaller ones are."""
    if is_borne(high):
        return high
    low = 0.0
    for _ in range(STEPS):
        rate = (low + high) / 2
        low, high = (rate, high) if is_borne(rate) else (low, rate)
    return low
