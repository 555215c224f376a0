"""Candidate shapes of a run and their estimated speed; arithmetic handles thousands of them in seconds.

A shape is the split of the model into stages, the microbatch size, the exchange of contributions and the
length of a round. `bottleneck` estimates a shape's speed from the compute and the links in each stage, less
the bandwidth of contributions. The best few shapes are simulated afterwards (shape_search.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import inf

from peers.config.errors import UserError
from peers.lab.planner.exchange import MAX_OF_A_LINE, Exchange, exchange_of, largest
from peers.lab.planner.placing import Placement, placed
from peers.lab.planner.plan_request import BACKWARD_RATIO, PlanRequest
from peers.lab.planner.shape import laws
from swarmnet.placement.policy import stage_work
from swarmnet.resources.link_bandwidth import LinkBandwidth, carried, crossing
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.local_step_config import TopologyName
from swarmnet.run.loss_law import LossLaw
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Paths, Sync
from swarmnet.run.sync_methods import COMMON_STEP_METHOD, DEFAULT_LOCAL_METHOD, MethodName

SEQUENCES = (1, 2, 4)
"""Sequences of a microbatch."""
LOCAL_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, laws.MAX_LOCAL_STEPS)
COMMON_TOKENS = tuple(1 << power for power in range(14, 25))
"""Tokens of a round where each round is one common step: 16 thousand to 17 million."""
EXCHANGES: tuple[TopologyName, ...] = ("all-gather", "sharded-reduce")
PARTS = 0
"""Fragments of the parameters, of which a round exchanges one; 0: the run's or its method's number."""
COMMON_PARTS = (1, 4, 8, 16)
"""Fragments where each round is one common step, as in the trials of docs/learning.md."""
LONGER = 3
"""`rounds.max_seconds` divided by the expected time of a round; the margin is for swarms that shrink."""


def own_method(sync: Sync) -> MethodName:
    """Return the local-step method of the candidates: the run's own if it is one, else the default."""
    return DEFAULT_LOCAL_METHOD if sync.local_steps is None else sync.method


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to split and to train a model."""

    stages: tuple[int, ...]
    """Layers of each stage."""
    sequences: int
    """Sequences of a microbatch."""
    exchange: TopologyName
    round_tokens: int
    """Tokens of a round, of the whole group."""
    inner_batch_tokens: int = 0
    """Tokens of a peer's local step; 0: a round is one common step."""
    parts: int = PARTS

    @property
    def local(self) -> bool:
        """Return whether peers take local steps."""
        return self.inner_batch_tokens > 0

    def boundary(self, run: Manifest) -> Boundary:
        """Return the run's boundary settings, at the stage boundaries of this shape."""
        cuts = tuple(accumulate(self.stages))[:-1]
        narrow = run.model.boundary
        return replace(narrow, after=cuts) if narrow.is_narrow and cuts else Boundary()

    def manifest(self, run: Manifest, round_seconds: float = inf) -> Manifest:
        """Return the run's manifest with this shape. `round_seconds`: expected time of a round, or inf."""
        longest = max(run.rounds.max_seconds, min(1e9, LONGER * round_seconds))
        sync = run.sync
        if self.local:
            sync = replace(
                sync.with_method(own_method(sync)),
                inner_batch_tokens=self.inner_batch_tokens,
                topology=self.exchange,
                fragments=self.parts or sync.fragments,
            )
        else:
            sync = replace(sync.with_method(COMMON_STEP_METHOD), topology=self.exchange, fragments=self.parts)
        return replace(
            run,
            model=replace(run.model, boundary=self.boundary(run)),
            stages=self.stages,
            paths=Paths(),
            data=replace(run.data, micro_batch_size=self.sequences),
            rounds=replace(run.rounds, global_batch_tokens=self.round_tokens, max_seconds=longest),
            sync=sync,
        )


@dataclass(frozen=True, slots=True)
class Judged:
    """A shape with its speed and cost, estimated by arithmetic."""

    shape: Shape
    tokens_per_second: float
    replicas: float
    """Mean number of peers in a stage."""
    loss_factor: float
    """Loss at equal tokens, divided by the loss of one peer alone."""
    tokens_factor: float
    """Tokens to the same loss, divided by the tokens that one peer alone needs."""
    seconds: float
    """Seconds to the loss that one peer alone has after the target's tokens."""


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """Peers of one stage with the same compute and the same link."""

    stage: int
    count: int
    computes: float
    """Tokens per second of each peer."""
    line: LinkBandwidth


def cuts(run: Manifest, stages: int) -> set[tuple[int, ...]]:
    """Return splits of the model into `stages` stages, as layers of each.

    One split is even. The other gives the last stage fewer layers, because it also computes the head.
    """
    layers = run.model.num_hidden_layers
    even = tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    head = stage_work(replace(run, stages=even))[-1] - even[-1]
    thick = (layers + head) / stages
    last = max(1, min(layers - stages + 1, round(thick - head)))
    rest, others = layers - last, stages - 1
    uneven = tuple(rest // others + (stage < rest % others) for stage in range(others)) if others else ()
    return {even, (*uneven, last)} if others else {even}


def shapes(run: Manifest, parameters: int, peers: int) -> Iterator[Shape]:
    """Yield all candidate shapes for a model of `parameters` parameters and `peers` peers."""
    own = run.sync.local_steps
    can_shard = own is None or own.delta_codec != "topk-2bit"
    for count in range(1, min(run.model.num_hidden_layers, peers) + 1):
        for stages in sorted(cuts(run, count)):
            for sequences in SEQUENCES:
                microbatch = sequences * run.data.seq_len
                for tokens, parts, exchange in product(COMMON_TOKENS, COMMON_PARTS, EXCHANGES):
                    if tokens >= microbatch:
                        yield Shape(stages, sequences, exchange, tokens, parts=parts)
                replicas = max(1.0, peers / count)
                best = laws.inner_batch_tokens(parameters, replicas)
                step = max(1, round(best / microbatch)) * microbatch
                for steps in LOCAL_STEPS:
                    tokens = int(steps * step * replicas)
                    yield Shape(stages, sequences, "all-gather", tokens, step)
                    if can_shard:
                        yield Shape(stages, sequences, "sharded-reduce", tokens, step)


class Judge:
    """Estimates shapes of one run for given peers; caches what several shapes have in common."""

    def __init__(self, *, run: Manifest, question: PlanRequest, parameters: int, target: float) -> None:
        self.run = run
        self.question = question
        self.parameters = parameters
        self.target = target
        self._placed = cache(self._place)
        self._contribution = cache(self._contributions)

    def judged(self, shape: Shape) -> Judged | None:
        """Return the estimate for a shape; None if the peers have too little memory for it."""
        manifest = shape.manifest(self.run)
        how = self._contribution(shape.stages, shape.parts, shape.local)
        how = replace(how, carried=shape.exchange, inner_batch_tokens=shape.inner_batch_tokens)
        placement = self._placed(shape.stages, shape.sequences, shape.local, shape.exchange)
        if placement is None:
            return None
        rate = bottleneck(manifest, how, kinds(manifest, placement))
        replicas = len(placement.peers) / len(shape.stages)
        loss, tokens = price(
            law=manifest.sync.config.loss_law,
            parameters=self.parameters,
            target=self.target,
            shape=shape,
            replicas=replicas,
            contribution_bytes=sum(how.contribution),
        )
        seconds = self.target * tokens / rate if rate > 0 else inf
        return Judged(shape, rate, replicas, loss, tokens, seconds)

    def _contributions(self, stages: tuple[int, ...], parts: int, local: bool) -> Exchange:
        """Return the exchange of shapes with these stages and fragments; fields that differ are not set."""
        shape = Shape(stages, 1, "all-gather", 1, 1 if local else 0, parts)
        return exchange_of(shape.manifest(self.run))

    def _place(
        self, stages: tuple[int, ...], sequences: int, local: bool, exchange: TopologyName
    ) -> Placement | None:
        manifest = Shape(stages, sequences, exchange, 1, 1 if local else 0).manifest(self.run)
        how = self._contribution(stages, PARTS, local)
        memory = [how.memory(manifest, stage) for stage in range(len(stages))]
        try:
            return placed(manifest, self.question, memory)
        except UserError:
            return None


def price(
    *,
    law: LossLaw,
    parameters: int,
    target: float,
    shape: Shape,
    replicas: float,
    contribution_bytes: float,
) -> tuple[float, float]:
    """Return two factors against one peer alone: the loss at equal tokens, and the tokens to equal loss.

    `contribution_bytes`: bytes of the contributions to one round, of one peer in each stage.
    """
    bits = 8 * contribution_bytes / parameters / shape.round_tokens
    batch = replicas * shape.inner_batch_tokens if shape.local else shape.round_tokens
    of_batch = laws.batch_factor(parameters, target, batch)
    loss_of_batch = laws.loss_of_one(parameters, target / of_batch) / laws.loss_of_one(parameters, target)
    more = laws.tokens_factor(
        parameters, target, lambda factor: law.ratio(replicas, bits * target * of_batch * factor)
    )
    return law.ratio(replicas, bits * target) * loss_of_batch, of_batch * more


def kinds(manifest: Manifest, placement: Placement) -> list[PeerGroup]:
    """Return the placed peers, grouped by stage, compute and link."""
    alike = Counter((peer.stage, peer.forward_seconds, peer.up, peer.down) for peer in placement.peers)
    tokens = manifest.microbatch_tokens / (1 + BACKWARD_RATIO)
    return [
        PeerGroup(stage, count, tokens / forward, LinkBandwidth(up, down))
        for (stage, forward, up, down), count in alike.items()
    ]


def bottleneck(manifest: Manifest, how: Exchange, peers: Sequence[PeerGroup]) -> float:
    """Return the tokens per second that the slowest stage allows.

    At this rate the peers of each stage can compute the tokens, and their links carry the contributions and
    then the microbatches.
    """
    last = len(manifest.stages) - 1
    groups = [[one for one in peers if one.stage == stage] for stage in range(last + 1)]
    sizes = [sum(one.count for one in group) for group in groups]
    down, up = (each / manifest.microbatch_tokens for each in (manifest.body_bytes, manifest.gradient_bytes))
    crossed = [crossing(stage, last + 1, down, up) for stage in range(last + 1)]
    thinnest = [min(min(one.line.up, one.line.down) for one in group) for group in groups]

    def bears(rate: float) -> bool:
        taken = [how.per_second(manifest, stage, rate, sizes[stage]) for stage in range(last + 1)]
        if any(took > MAX_OF_A_LINE * line for took, line in zip(taken, thinnest, strict=True)):
            return False
        return all(
            rate
            <= (1 + 1e-9)
            * sum(
                one.count * carried(one.computes, one.line.without(taken[stage]), crossed[stage])
                for one in group
            )
            for stage, group in enumerate(groups)
        )

    computed = min(sum(one.count * one.computes for one in group) for group in groups)
    return largest(computed, bears)
