"""Shapes that a run could have, and what each comes to by arithmetic: thousands in seconds.

A shape is how the model is cut, how much of the text travels at a time, how peers exchange what they learned,
and how long a round is. `bottleneck` is a pure function: of compute and lines in each stage where peers would
be, with what contributions take. The best few are played afterwards (search.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf

from peers.errors import UserError
from peers.lab.planner.exchange import (
    MAX_OF_A_LINE,
    Exchange,
    exchange_of,
    largest,
)
from peers.lab.planner.placing import Placement, placed
from peers.lab.planner.plan_request import BACKWARD_RATIO, PlanRequest
from peers.lab.planner.shape import laws
from swarmnet.placement.policy import stage_work
from swarmnet.resources.link_bandwidth import LinkBandwidth, carried, crossing
from swarmnet.run.boundary import Boundary
from swarmnet.run.manifest import Manifest, MethodName, Paths, Sync, TopologyName

SEQUENCES = (1, 2, 4)
"""Of a microbatch."""
LOCAL_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, laws.MAX_LOCAL_STEPS)
VOTED_TOKENS = tuple(1 << power for power in range(14, 25))
"""Of a round, where each round is one step of all: 16 thousand to 17 million."""
PARTS = 0
"""A round exchanges one of so many parts of the parameters; 0: as the run or its method has it."""
LONGER = 3
"""rounds.max_seconds, in the time that a round takes: it is for swarms that have shrunk."""


def own_method(sync: Sync) -> MethodName:
    """By which peers step by themselves: the run's own, if it is of that kind."""
    return "local-steps" if sync.local_steps is None else sync.method


@dataclass(frozen=True, slots=True)
class Shape:
    stages: tuple[int, ...]
    """Layers of each."""
    sequences: int
    """Of a microbatch."""
    exchange: TopologyName
    round_tokens: int
    """Of the whole group."""
    inner_batch_tokens: int = 0
    """Of one peer, after which it takes a step of its own; 0: a round is one step of all, by votes."""
    parts: int = PARTS

    @property
    def local(self) -> bool:
        return self.inner_batch_tokens > 0

    def boundary(self, run: Manifest) -> Boundary:
        """The run's own, at the cuts of this shape."""
        cuts = tuple(accumulate(self.stages))[:-1]
        narrow = run.model.boundary
        return replace(narrow, after=cuts) if narrow.is_narrow and cuts else Boundary()

    def manifest(self, run: Manifest, round_seconds: float = inf) -> Manifest:
        """The run in this shape. `round_seconds`: how long a round will take; inf: as long as it likes."""
        longest = max(run.rounds.max_seconds, min(1e9, LONGER * round_seconds))
        sync = run.sync
        if self.local:
            sync = replace(
                sync,
                method=own_method(sync),
                inner_batch_tokens=self.inner_batch_tokens,
                topology=self.exchange,
                fragments=self.parts or sync.fragments,
            )
        elif sync.local_steps is not None:
            sync = replace(sync, method="demo-sign", topology="all-gather")
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
    """A shape by arithmetic."""

    shape: Shape
    tokens_per_second: float
    replicas: float
    """Peers of a stage, on the mean."""
    loss_factor: float
    """At as many tokens as one alone needs, for what replicas cost."""
    tokens_factor: float
    """Times the tokens to the same loss."""
    seconds: float
    """To the loss that one alone has after the target."""


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """Peers of one stage that are alike."""

    stage: int
    count: int
    computes: float
    """Tokens per second of each."""
    line: LinkBandwidth


def cuts(run: Manifest, stages: int) -> set[tuple[int, ...]]:
    """The model in so many stages: evenly, and with fewer layers beside the head where that costs much."""
    layers = run.model.num_hidden_layers
    even = tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    head = stage_work(replace(run, stages=even))[-1] - even[-1]
    thick = (layers + head) / stages
    last = max(1, min(layers - stages + 1, round(thick - head)))
    rest, others = layers - last, stages - 1
    uneven = tuple(rest // others + (stage < rest % others) for stage in range(others)) if others else ()
    return {even, (*uneven, last)} if others else {even}


def shapes(run: Manifest, parameters: int, peers: int) -> Iterator[Shape]:
    """All that are looked at."""
    own = run.sync.local_steps
    can_shard = own is None or own.delta_codec != "topk-2bit"
    for count in range(1, min(run.model.num_hidden_layers, peers) + 1):
        for stages in sorted(cuts(run, count)):
            for sequences in SEQUENCES:
                microbatch = sequences * run.data.seq_len
                for tokens in VOTED_TOKENS:
                    if tokens >= microbatch:
                        yield Shape(stages, sequences, "all-gather", tokens)
                replicas = max(1.0, peers / count)
                best = laws.inner_batch_tokens(parameters, replicas)
                step = max(1, round(best / microbatch)) * microbatch
                for steps in LOCAL_STEPS:
                    tokens = int(steps * step * replicas)
                    yield Shape(stages, sequences, "all-gather", tokens, step)
                    if can_shard:
                        yield Shape(stages, sequences, "sharded-reduce", tokens, step)


class Judge:
    """Judges shapes of one run for given peers. What shapes have in common is computed once."""

    def __init__(self, run: Manifest, question: PlanRequest, parameters: int, target: float) -> None:
        self.run, self.question, self.parameters, self.target = run, question, parameters, target
        self._placed = cache(self._place)
        self._contribution = cache(self._contributions)

    def judged(self, shape: Shape) -> Judged | None:
        """None: peers cannot hold it."""
        manifest = shape.manifest(self.run)
        how = self._contribution(shape.stages, shape.sequences, shape.local)
        if shape.local:
            how = replace(how, carried=shape.exchange, inner_batch_tokens=shape.inner_batch_tokens)
        placement = self._placed(shape.stages, shape.sequences, shape.local, shape.exchange)
        if placement is None:
            return None
        rate = bottleneck(manifest, how, kinds(manifest, placement))
        replicas = len(placement.peers) / len(shape.stages)
        return self._ranked(shape, rate, replicas)

    def _ranked(self, shape: Shape, rate: float, replicas: float) -> Judged:
        loss, tokens = price(self.parameters, self.target, shape, replicas)
        seconds = self.target * tokens / rate if rate > 0 else inf
        return Judged(shape, rate, replicas, loss, tokens, seconds)

    def _contributions(self, stages: tuple[int, ...], sequences: int, local: bool) -> Exchange:
        """Without what shapes of the same stages differ in."""
        shape = Shape(stages, sequences, "all-gather", 1, 1 if local else 0)
        return exchange_of(shape.manifest(self.run))

    def _place(
        self, stages: tuple[int, ...], sequences: int, local: bool, exchange: TopologyName
    ) -> Placement | None:
        manifest = Shape(stages, sequences, exchange, 1, 1 if local else 0).manifest(self.run)
        how = self._contribution(stages, sequences, local)
        memory = [how.memory(manifest, stage) for stage in range(len(stages))]
        try:
            return placed(manifest, self.question, memory)
        except UserError:
            return None


def price(parameters: int, target: float, shape: Shape, replicas: float) -> tuple[float, float]:
    """What a shape costs in loss at equal tokens, as a factor, and in tokens to the same loss."""
    if not shape.local:
        return 1.0, laws.batch_factor(parameters, target, shape.round_tokens)
    loss = laws.loss_factor(replicas)
    return loss, laws.tokens_factor(parameters, target, loss)


def kinds(manifest: Manifest, placement: Placement) -> list[PeerGroup]:
    alike = Counter((peer.stage, peer.forward_seconds, peer.up, peer.down) for peer in placement.peers)
    tokens = manifest.microbatch_tokens / (1 + BACKWARD_RATIO)
    return [
        PeerGroup(stage, count, tokens / forward, LinkBandwidth(up, down))
        for (stage, forward, up, down), count in alike.items()
    ]


def bottleneck(manifest: Manifest, how: Exchange, peers: Sequence[PeerGroup]) -> float:
    """Tokens per second: the largest rate at which the peers of each stage compute it and their lines carry
    its contributions, then its microbatches."""
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
            rate <= (1 + 1e-9) * sum(
                one.count * carried(one.computes, one.line.without(taken[stage]), crossed[stage])
                for one in group
            )
            for stage, group in enumerate(groups)
        )  # fmt: skip

    computed = min(sum(one.count * one.computes for one in group) for group in groups)
    return largest(computed, bears)
