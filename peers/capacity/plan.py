"""What a run could do with given peers: tokens per second, days, bytes, the weakest stage, churn's price.

Speeds become seconds per microbatch and stage by counting the stage's matrix products; peers go to the stage
that has least (as newcomers do, swarmnet/moving.py); the maximum flow of the whole swarm is exact (bound.py),
and what share of it real routing reaches is simulated. Of a large swarm a sample is simulated, every kind of
peer in its proportion: a peer knows `KNOWN_BELOW` peers of the next stage however large that is, so what it
sees is alike.

What churn costs is arithmetic: a peer that leaves is missed by its stage, and so by all, until another has
joined in its place, and what was under way at it is computed again elsewhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from peers.capacity import bound
from peers.capacity.layout import Layout, PeerSpec, Work
from peers.capacity.speeds import PeerClass
from peers.capacity.swarm import Swarm
from peers.demo.report import contribution_bytes
from peers.errors import UserError
from protocols.frames import wire_bytes
from protocols.messages import Act, encode
from swarmnet.bodies import encoded_bytes
from swarmnet.layout import layout_of
from swarmnet.manifest import Manifest
from swarmnet.parameters import EMBEDDING, parameter_shapes
from swarmnet.router import Router

KNOWN_BELOW = 16
SIMULATED_PEERS = 300
BACKWARD_RATIO = 2.0
"""Two matrix products per weight backward, one forward."""
WINDOW = 2.5
"""Microbatches under way, in those that the way itself holds: what `Flow` comes to
(docs/benchmarks/routing.md)."""
WARM_PATHS, MEASURED_PATHS = 6.0, 10.0
"""How long is simulated, in times that an unhindered microbatch takes."""
LEAST_MICROBATCHES = 400
JOIN_SECONDS = 10.0
"""From a newcomer's start to its first contribution, without the download: 6.8 s alone, 11.7 on a busy
machine (docs/benchmarks/demo.md)."""
SHARES = 4096
"""Steps by which `thinnest_share` adds up: a large stage misses a few of thousands."""
DAY = 86400.0
WEIGHT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """Processor seconds of this machine per microbatch and stage, everything that a peer does counted in."""

    alone: tuple[float, ...]
    """With one peer per stage."""
    per_peer: tuple[float, ...]
    """More for every further peer in the group: its contributions."""


@dataclass(frozen=True, slots=True)
class Question:
    classes: tuple[PeerClass, ...]
    latency: tuple[float, float] = (0.005, 0.15)
    """Seconds one way between two peers, drawn evenly."""
    churn: float = 0.0
    """Share of the peers that leave in an hour, as many joining."""
    tokens: int | None = None
    """The run's target; None: until its learning rate has come down."""
    cores: int = 0
    """Cores that all peers share; 0: each has its own."""
    measured: Measured | None = None
    slots: int = 32
    """`slots` and `in_flight` of the peers' files."""
    simulated: int = SIMULATED_PEERS
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    peers: tuple[int, ...]
    """Per stage."""
    capacity: tuple[float, ...]
    """Tokens per second of each stage alone."""
    simulated: int
    most: float
    """Tokens per second: the maximum flow, or what the shared cores can do."""
    tokens_per_second: float
    """Without churn."""
    churned: float
    """With it."""
    days: float
    target: int
    data_bytes: tuple[float, ...]
    """Per peer of each stage and day, sent; as much is received."""
    update_bytes: tuple[float, ...]
    round_seconds: float
    line_share: float
    """The largest part of a line that updates take."""

    @property
    def weakest(self) -> int:
        return min(range(len(self.capacity)), key=self.capacity.__getitem__)


def stage_shares(manifest: Manifest) -> tuple[float, ...]:
    """Each stage's part of the compute: matrix products per token, attention's own counted in."""
    model, tokens = manifest.model, manifest.data.sequence_tokens
    shares = []
    for stage, layers in enumerate(manifest.stages):
        shapes = parameter_shapes(model, manifest.span(stage))
        products = sum(a * b for name, (a, *rest) in shapes.items() if name != EMBEDDING for b in rest)
        shares.append(products + layers * tokens * 2 * model.heads * model.head_width)
    return tuple(share / sum(shares) for share in shares)


def plan(manifest: Manifest, question: Question) -> Answer:
    """Raises UserError where there are too few peers."""
    tokens = manifest.microbatch_tokens
    placed = _placed(manifest, question, tokens)
    whole = _layout(manifest, question, placed)
    capacity, stages = whole.capacity(), whole.stages()
    most = bound.most(stages, capacity)
    if question.cores:
        seconds = [(1 + BACKWARD_RATIO) * peer.forward_seconds for peer in placed]
        each = [sum(seconds[peer] for peer in peers) / len(peers) for peers in stages]
        most = min(most, question.cores / sum(each))
    sample = _sample(placed, question.simulated)
    rate, bound_of_sample = _simulated(_layout(manifest, question, sample), question, most)
    rate *= most / bound_of_sample
    per_second = rate * tokens
    churned = per_second * _kept(manifest, question, whole, rate)
    target = question.tokens or manifest.sync.decay_rounds * manifest.rounds.target_tokens
    round_seconds = max(manifest.rounds.target_tokens, tokens) / churned
    updates = tuple(
        (len(peers) - 1) * contribution_bytes(manifest, stage) / round_seconds
        for stage, peers in enumerate(stages)
    )
    last = len(stages) - 1
    bodies = [(stage > 0) + (stage < last) for stage in range(len(stages))]
    slowest = [min(min(placed[peer].up, placed[peer].down) for peer in peers) for peers in stages]
    return Answer(
        peers=tuple(map(len, stages)),
        capacity=tuple(sum(capacity[peer] for peer in peers) * tokens for peers in stages),
        simulated=len(sample), most=most * tokens, tokens_per_second=per_second, churned=churned,
        days=target / churned / DAY, target=target,
        data_bytes=tuple(
            churned / tokens * count * whole.work.body_bytes / len(peers) * DAY
            for count, peers in zip(bodies, stages, strict=True)
        ),
        update_bytes=tuple(rate * DAY for rate in updates), round_seconds=round_seconds,
        line_share=max(rate / line for rate, line in zip(updates, slowest, strict=True)),
    )  # fmt: skip


def _placed(manifest: Manifest, question: Question, tokens: int) -> list[PeerSpec]:
    """Every peer, the fastest first, in the stage that has least so far."""
    shares = stage_shares(manifest)
    count = sum(one.count for one in question.classes)
    if count < len(shares):
        raise UserError(f"{count} peers cannot hold {len(shares)} stages: one each at least")
    thinnest = [(0.0, stage) for stage in range(len(shares))]
    heapq.heapify(thinnest)
    placed: list[PeerSpec] = []
    for one in sorted(question.classes, key=lambda one: -(one.tokens_per_second or 0.0)):
        for _ in range(one.count):
            has, stage = heapq.heappop(thinnest)
            seconds = _seconds(question, one, shares, stage, tokens, count)
            heapq.heappush(thinnest, (has + 1 / seconds, stage))
            forward = seconds / (1 + BACKWARD_RATIO)
            spec = PeerSpec(stage, forward, one.up, one.down, slots=question.slots)
            if question.cores:  # One machine: nothing goes over a line.
                spec = PeerSpec(stage, forward, slots=question.slots, machine=0)
            placed.append(spec)
    return placed


def _seconds(
    question: Question, one: PeerClass, shares: Sequence[float], stage: int, tokens: int, count: int
) -> float:
    """Of a microbatch on a peer of that kind in that stage, forward and backward."""
    if one.tokens_per_second is not None:
        return shares[stage] * tokens / one.tokens_per_second
    if question.measured is None:
        raise UserError("peers without a speed are as fast as this machine: measure it with --measure")
    alone, more = question.measured.alone[stage], question.measured.per_peer[stage]
    return alone + more * (count / len(shares) - 1)


def _sample(placed: Sequence[PeerSpec], wanted: int) -> list[PeerSpec]:
    """Every n-th peer of each stage, in the order of speed."""
    every = max(1.0, len(placed) / wanted)
    found: list[PeerSpec] = []
    for stage in sorted({peer.stage for peer in placed}):
        peers = [peer for peer in placed if peer.stage == stage]
        count = max(1, round(len(peers) / every))
        found += [peers[int((index + 0.5) * len(peers) / count)] for index in range(count)]
    return found


def _layout(manifest: Manifest, question: Question, peers: Sequence[PeerSpec]) -> Layout:
    shape = manifest.hidden_shape
    body = (manifest.body_bytes + encoded_bytes(shape, manifest.hidden_codec)) // 2  # Labels go down only.
    header = len(encode(Act("x" * 52, 10**6, 1, 1, 10.0, shape)))
    return Layout(tuple(peers), _latency(question), Work(wire_bytes(header, body), BACKWARD_RATIO),
                  cores=question.cores)  # fmt: skip


def _latency(question: Question) -> Callable[[int, int], float]:
    """Of a pair, always the same: a hash of the two, so that ten thousand peers need no table."""
    low, high = question.latency

    def between(a: int, b: int) -> float:
        mixed = (min(a, b) * 2654435761 ^ max(a, b) * 40503 ^ question.seed * 97) * 2246822519 & 0xFFFFFFFF
        return low + (high - low) * ((mixed ^ mixed >> 15) & 0xFFFF) / 0xFFFF

    return between


def _simulated(layout: Layout, question: Question, most: float) -> tuple[float, float]:
    """Microbatches per second of the sample, and the most that it could do."""
    stages, capacity = layout.stages(), layout.capacity()
    chance = Random(question.seed)
    below = tuple(
        tuple(chance.sample(following, min(KNOWN_BELOW, len(following)))) if following else ()
        for peer in layout.peers
        for following in ((*stages, ())[peer.stage + 1],)
    )
    layout = replace(layout, below=below)
    best = bound.most(stages, capacity)
    if question.cores:
        best = min(best, most)
    path = sum(len(peers) / sum(capacity[peer] for peer in peers) for peers in stages)
    path += (len(stages) - 1) * sum(question.latency)
    first = sum(capacity[peer] for peer in stages[0])
    under_way = WINDOW * best * path
    specs = tuple(
        replace(peer, window=min(question.slots, 2 + round(under_way * capacity[number] / first)))
        if not peer.stage
        else peer
        for number, peer in enumerate(layout.peers)
    )
    swarm = Swarm(replace(layout, peers=specs), Router, question.seed)
    warm = WARM_PATHS * path
    measured = max(MEASURED_PATHS * path, LEAST_MICROBATCHES / best)
    swarm.start()
    swarm.run(warm)
    before = swarm.finished
    swarm.run(warm + measured)
    return (swarm.finished - before) / measured, best


def thinnest_share(capacity: Sequence[float], peers: Sequence[int], missing: Sequence[float]) -> float:
    """What is left of the thinnest stage's capacity on average, while of each stage so many peers are missing
    on average, by chance (Poisson). One that is missing holds up the whole swarm by its part of its stage;
    those that are missing in several stages at once do so by no more than the worst of these."""
    least = min(capacity)
    left = torch.linspace(0.0, 1.0, SHARES + 1, dtype=torch.float64)
    at_least = torch.ones_like(left)
    for has, count, mean in zip(capacity, peers, missing, strict=True):
        spared = torch.floor(count * (1.0 - left * least / has) + 1e-9)
        at_least *= torch.special.gammaincc(spared + 1.0, torch.full_like(left, max(mean, 1e-12)))
    return float(torch.trapezoid(at_least, left))


def _kept(manifest: Manifest, question: Question, layout: Layout, rate: float) -> float:
    """The share of the speed that churn leaves."""
    if not question.churn:
        return 1.0
    per_second = question.churn / 3600.0
    size = [
        layout_of(parameter_shapes(manifest.model, manifest.span(stage))).size
        for stage in range(len(manifest.stages))
    ]
    missing = [
        per_second * (JOIN_SECONDS + WEIGHT_BYTES * size[peer.stage] / peer.down) for peer in layout.peers
    ]
    capacity = layout.capacity()
    present = thinnest_share(
        [sum(capacity[peer] for peer in peers) for peers in layout.stages()],
        [len(peers) for peers in layout.stages()],
        [sum(missing[peer] for peer in peers) for peers in layout.stages()],
    )
    path = sum(len(peers) / sum(capacity[p] for p in peers) for peers in layout.stages())
    held = WINDOW * rate * (path + (len(layout.stages()) - 1) * sum(question.latency)) / len(layout.peers)
    lost = per_second * held * len(layout.peers) / rate
    return present * max(0.0, 1.0 - lost)
