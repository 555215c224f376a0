"""Traffic and memory of the exchange of contributions, for the planner.

`exchange_of` reads from the manifest how the peers of a run exchange contributions; no other planner code
does. Contributions have priority over activations and gradients on each link (`charged`), because every peer
of a group must receive every round to stay in step.
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
from swarmnet.optimizer.method import method_of
from swarmnet.optimizer.result_parts import ResultParts
from swarmnet.pipeline.flow_control import graph_bytes
from swarmnet.resources.bandwidth_estimate import rounds_per_second
from swarmnet.resources.memory_estimate import needs_of
from swarmnet.run.local_step_config import TopologyName
from swarmnet.run.manifest import Manifest
from swarmnet.run.sync_methods import COUNT_BITS

ALONE_BYTES = 16
"""Memory per parameter of a peer that trains alone: weights, gradient and two moments, 4 bytes each."""
MAX_OF_A_LINE = 0.9
"""Part of a link that contributions may fill: packet headers take 4 %, heartbeats and resends the rest."""
STEPS = 40
"""Steps of bisection."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """How the peers of a group exchange contributions, and the bytes that this takes."""

    contribution: tuple[float, ...]
    """Bytes of one contribution, by stage."""
    results: tuple[float, ...]
    """Bytes of all results of a round, by stage; empty if the method cannot use reducers."""
    carried: TopologyName = "all-gather"
    """`all-gather`: each peer receives each contribution. `sharded-reduce`: each peer sends slices of one
    contribution to reducers, which add them up; the sums go to all peers, whatever the group's size."""
    inner_batch_tokens: int = 0
    """Tokens that a peer trains before it can contribute; 0: one microbatch."""

    def contributions(self, manifest: Manifest, tokens_per_second: float, group: int) -> float:
        """Return the contributions per second of a group that commits `tokens_per_second`.

        A peer makes at most one in a round, and none if it had too few tokens of the round.
        """
        step = max(self.inner_batch_tokens, manifest.microbatch_tokens)
        return min(group * rounds_per_second(manifest, tokens_per_second), tokens_per_second / step)

    def per_second(self, manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> float:
        """Return the bytes per second on each peer's link, the same up and down.

        Both are equal in any topology, because a peer has sent each byte that another receives.
        """
        rounds = rounds_per_second(manifest, tokens_per_second)
        made = self.contributions(manifest, tokens_per_second, group)
        return self._bytes(stage, group, made, rounds)

    def per_round(self, stage: int, group: int) -> float:
        """Return the bytes on each peer's link for a round to which all peers contribute."""
        return self._bytes(stage, group, group, 1)

    def _bytes(self, stage: int, group: int, made: float, rounds: float) -> float:
        if group < 2:
            return 0.0
        if self.carried == "all-gather":
            return made * (group - 1) / group * self.contribution[stage]
        return made / group * self.contribution[stage] + rounds * self.results[stage]

    def memory(self, manifest: Manifest, stage: int) -> int:
        """Return the bytes of GPU memory that a peer of `stage` needs, with one microbatch at a time."""
        return needs_of(manifest, stage, 0, CARD).least


COUNTED = 2**COUNT_BITS - 1
"""Contributors in a result: the most whose counts of votes have `COUNT_BITS` bits."""
CARD = Computing(dtype="bf16")
"""Computing settings of a peer with a GPU, unless its configuration sets others."""


def exchange_of(manifest: Manifest) -> Exchange:
    """Return the exchange that the manifest of a run defines."""
    sync, own, stages = manifest.sync, manifest.sync.local_steps, range(len(manifest.stages))
    step = (sync.inner_batch_tokens or manifest.microbatch_tokens) if own is not None else 0
    can_shard = sync.config.can_shard and (own is None or own.delta_codec != "topk-2bit")
    return Exchange(
        tuple(contribution_bytes(manifest, stage) for stage in stages),
        tuple(result_bytes(manifest, stage) for stage in stages) if can_shard else (),
        sync.topology,
        step,
    )


def result_bytes(manifest: Manifest, stage: int) -> int:
    """Return the bytes on the wire of all results of a round that covers the whole stage, with reducers.

    The results' tables are not counted: a few dozen bytes for each contributor.
    """
    sharded = replace(manifest, sync=replace(manifest.sync, topology="sharded-reduce"))
    reduced = method_of(sharded, trained_layout(manifest, stage), "meta").reduced
    assert isinstance(reduced, ResultParts), "the method can use reducers"
    return wire_bytes(len(encode(Contribution())), ENVELOPE_BYTES + reduced.all_sums_bytes(COUNTED))


def parameters_of(manifest: Manifest, stage: int) -> int:
    return trained_layout(manifest, stage).size


def alone_memory(manifest: Manifest) -> int:
    """Return the bytes of memory to train the whole model on one peer, one sequence at a time."""
    data = replace(manifest.data, micro_batch_size=1)
    whole = replace(manifest, stages=(manifest.model.num_hidden_layers,), data=data)
    return ALONE_BYTES * parameters_of(whole, 0) + graph_bytes(whole, 0)


def charged(
    layout: SwarmLayout,
    most: Callable[[SwarmLayout], float],
    taken: Callable[[float], Sequence[float]],
) -> tuple[SwarmLayout, float]:
    """Return the layout with the bandwidth of contributions taken off its links, and the rate that remains.

    The rate is the largest, in microbatches per second, at which links carry both contributions and
    activations. `most(layout)` returns the rate that compute and the remaining bandwidth allow. `taken(rate)`
    returns the contributions' bytes per second on the links of each stage's peers.
    """
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
    """Return the largest rate up to `high` for which `is_borne` is true, by bisection.

    Requires that `is_borne` is true for all rates below one for which it is true.
    """
    if is_borne(high):
        return high
    low = 0.0
    for _ in range(STEPS):
        rate = (low + high) / 2
        low, high = (rate, high) if is_borne(rate) else (low, rate)
    return low
