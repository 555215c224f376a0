"""What a run could do with given peers: tokens per second, days, bytes, the weakest stage, churn's price.

Speeds become seconds per microbatch and stage by counting the stage's matrix products; peers go to the stage
that has least (as newcomers do, swarmnet/placement/policy.py); contributions take their part of the lines
(exchange.py); the maximum flow of the whole swarm on the rest is exact (max_flow.py, visits.py), and what
share of it real routing reaches is played (playing.py), with and without churn (churn.py). A run that begins
whole and then skips is played both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from peers.errors import UserError
from peers.lab.planner.churn import computed, turnover
from peers.lab.planner.exchange import (
    Exchange,
    alone_memory,
    charged,
    exchange_of,
)
from peers.lab.planner.layout import PeerSpec, SwarmLayout, Work
from peers.lab.planner.placing import Placement, placed, sample
from peers.lab.planner.plan_request import (
    BACKWARD_RATIO,
    Bounds,
    Churn,
    PlanRequest,
    PlanResult,
    SinglePeerBaseline,
)
from peers.lab.planner.playing import WINDOW, Course, Played, course, play, playable
from protocols.framing.frames import wire_bytes
from protocols.messages.table import Act, encode
from swarmnet.resources.bandwidth_estimate import rounds_per_second
from swarmnet.run.manifest import Manifest
from swarmnet.run.path_rules import PathRules

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class PlanPhase:
    """A part of the run in which microbatches visit equally many stages."""

    layout: SwarmLayout
    """Of the whole swarm."""
    placement: Placement
    course: Course
    """On what contributions leave of the lines."""
    most: tuple[float, float, float]
    """Tokens per second: by compute alone, as lines carry them, and beside contributions."""
    played: Played
    simulated: int
    churn: Churn
    tokens_per_second: float

    @property
    def churned(self) -> float:
        return self.tokens_per_second * (1 - self.churn.costs)


def plan(manifest: Manifest, question: PlanRequest, exchange: Exchange | None = None) -> PlanResult:
    """Raises UserError where there are too few peers, or nothing comes of them. `exchange`: None: as the run
    says."""
    exchange, rules = exchange or exchange_of(manifest), manifest.path_rules()
    skips = rules.most_skipped > 0
    full_path_warmup_rounds = rules.full_path_warmup_rounds if skips else 0
    plays = 1 + (full_path_warmup_rounds > 0)
    later = _stretch(manifest, question, exchange, rules if skips else None, plays)
    whole = 0.0
    if full_path_warmup_rounds:
        calm = _stretch(manifest, replace(question, churn=0.0), exchange, None, plays)
        whole = calm.tokens_per_second * (1 - later.churn.costs)
    target = question.tokens or _target(manifest)
    tokens, stages, capacity = manifest.microbatch_tokens, later.layout.stages(), later.layout.capacity()
    committed = [later.churned * part for part in later.played.visited]
    updates = _updates(manifest, exchange, stages, committed)
    full = _updates(manifest, exchange, stages, committed, full=True)
    compute, lines, beside = later.most
    return PlanResult(
        peers=tuple(map(len, stages)),
        capacity=tuple(sum(capacity[peer] for peer in peers) * tokens for peers in stages),
        visited=later.played.visited, simulated=later.simulated, most=beside,
        tokens_per_second=later.tokens_per_second, churned=later.churned, churn=later.churn,
        full_path_warmup_rounds=full_path_warmup_rounds, whole=whole, target=target,
        days=_seconds(manifest, target, full_path_warmup_rounds, whole, later.churned) / DAY,
        data_bytes=_data_bytes(later.layout, [rate / tokens for rate in committed]),
        update_bytes=tuple(rate * DAY for rate in updates),
        round_seconds=tuple(1 / rounds_per_second(manifest, rate) for rate in committed),
        line_share=_line_share(later.layout, updates),
        full_line_share=_line_share(later.layout, full),
        bounds=Bounds(summed(question), compute, lines, beside, later.tokens_per_second),
        alone=alone(manifest, question),
        memory=tuple(exchange.memory(manifest, stage) for stage in range(len(stages))),
        left_out=later.placement.left_out,
    )  # fmt: skip


def _target(manifest: Manifest) -> int:
    """Tokens, until the learning rate has come down."""
    return manifest.sync.decay_rounds * manifest.rounds.global_batch_tokens


def summed(question: PlanRequest) -> float:
    """Tokens per second of all peers, if each computed the whole model."""
    total = sum(one.count * one.tokens_per_second for one in question.classes)
    fastest = max(one.tokens_per_second for one in question.classes)
    return min(total, question.cores * fastest) if question.cores else total


def alone(manifest: Manifest, question: PlanRequest) -> SinglePeerBaseline:
    """The fastest peer that has memory for the whole model, or else the fastest."""
    needs = alone_memory(manifest)
    found = [SinglePeerBaseline(one.tokens_per_second, needs, one.memory) for one in question.classes]
    return max(found, key=lambda one: (one.fits, one.tokens_per_second))


def _stretch(
    manifest: Manifest, question: PlanRequest, exchange: Exchange, rules: PathRules | None, plays: int
) -> PlanPhase:
    """`rules`: by which microbatches leave stages out; None: by none."""
    memory = [exchange.memory(manifest, stage) for stage in range(len(manifest.stages))]
    placement = placed(manifest, question, memory, whole=rules is None)
    peers = placement.peers
    whole, bounds = lay_out(manifest, question, exchange, peers, rules)
    way = course(whole, question.seed)
    wanted = question.simulated or playable(whole, way, question.slots, plays, question.churn > 0)
    some = sample(peers, wanted)
    part = replace(_layout(manifest, question, some, rules), taken=whole.taken)
    its_way = course(part, question.seed)
    away = turnover(manifest, question, some) if question.churn else None
    played = play(part, its_way, question.slots, question.seed, away)
    churn = Churn()
    if away is not None:
        away_of_all = turnover(manifest, question, peers)
        churn = Churn(
            question.churn * len(peers), played.churn_costs,
            computed(away_of_all, whole, way.visited, WINDOW * way.path), played.deaths, away.hastened(),
        )  # fmt: skip
    rate = min(1.0, played.rate / its_way.most) * bounds[-1]  # More is the scatter of compute times.
    found = PlanPhase(whole, placement, way, bounds, played, len(some), churn, rate)
    if found.churned <= 0:
        why = "with so much churn" if rate > 0 else "on such lines, or of peers so slow"
        raise UserError(f"nothing is trained {why}: no microbatch came back to where it started")
    return found


def lay_out(
    manifest: Manifest,
    question: PlanRequest,
    exchange: Exchange,
    peers: Sequence[PeerSpec],
    rules: PathRules | None,
) -> tuple[SwarmLayout, tuple[float, float, float]]:
    """The swarm with what contributions take of its lines, and the tokens per second that it bears: by
    compute alone, as lines carry them, and beside contributions."""
    layout, tokens = _layout(manifest, question, peers, rules), manifest.microbatch_tokens
    way, stages = course(layout, question.seed), layout.stages()

    def taken(rate: float) -> list[float]:
        committed = [rate * tokens * part for part in way.visited]
        return _updates(manifest, exchange, stages, committed)

    def most(one: SwarmLayout) -> float:
        return course(one, question.seed).most

    found, rate = (layout, way.most) if question.cores else charged(layout, most, taken)
    unbound = replace(layout, peers=tuple(replace(peer, up=inf, down=inf) for peer in peers))
    return found, (most(unbound) * tokens, way.most * tokens, rate * tokens)


def _layout(
    manifest: Manifest, question: PlanRequest, peers: Sequence[PeerSpec], rules: PathRules | None
) -> SwarmLayout:
    shape = manifest.hidden_shape
    body = (manifest.body_bytes + manifest.gradient_bytes) // 2  # Labels or tokens go down only.
    header = len(encode(Act("x" * 52, 10**6, 1, 1, 10.0, shape)))
    links, regions = question.between(), [peer.region for peer in peers]
    if rules is not None:  # What is asked for is the time after the rounds that are whole.
        rules = replace(rules, full_path_warmup_rounds=0, most_swaps=0)
    return SwarmLayout(
        tuple(peers), links.between(regions, question.seed), Work(wire_bytes(header, body), BACKWARD_RATIO),
        cores=question.cores, rules=rules,
        connection=None if question.cores else links.carried(regions),
    )  # fmt: skip


def _updates(
    manifest: Manifest,
    exchange: Exchange,
    stages: Sequence[Sequence[int]],
    committed: Sequence[float],
    full: bool = False,
) -> list[float]:
    """Bytes per second that contributions take, up and down alike, at a peer of each stage. `committed`:
    tokens per second. `full`: if every peer contributed to every round, and rounds had their tokens."""
    groups = [
        (stage, len(peers), rate) for stage, (peers, rate) in enumerate(zip(stages, committed, strict=True))
    ]
    if full:
        rounds = manifest.rounds.global_batch_tokens
        return [exchange.per_round(stage, group) * rate / rounds for stage, group, rate in groups]
    return [exchange.per_second(manifest, stage, rate, group) for stage, group, rate in groups]


def _data_bytes(layout: SwarmLayout, committed: Sequence[float]) -> tuple[float, ...]:
    """Per day, at a peer of each stage that commits so many microbatches per second, on the mean: one body
    sent at the ends of the way, two between."""
    stages = layout.stages()
    return tuple(
        rate * layout.crossing(stage).sent / len(peers) * DAY
        for stage, (rate, peers) in enumerate(zip(committed, stages, strict=True))
    )


def _line_share(layout: SwarmLayout, rates: Sequence[float]) -> float:
    """The largest part of a line that so many bytes per second take, by stage."""
    lines = [min(peer.up, peer.down) for peer in layout.peers]
    slowest = [min(lines[peer] for peer in peers) for peers in layout.stages()]
    return max(rate / line for rate, line in zip(rates, slowest, strict=True))


def _seconds(
    manifest: Manifest, target: int, full_path_warmup_rounds: int, whole: float, later: float
) -> float:
    """Until the target, the first rounds at one pace and the rest at another; tokens per second."""
    if not full_path_warmup_rounds:
        return target / later
    at_first = min(target, full_path_warmup_rounds * whole / rounds_per_second(manifest, whole))
    return at_first / whole + (target - at_first) / later
