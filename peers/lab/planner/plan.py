"""Estimate what given peers reach: tokens per second, days, bytes, the weakest stage and the cost of churn.

The estimate has these steps:
- The matrix products of a stage turn a peer's speed into seconds per microbatch and stage.
- Peers are placed in the stage with the least capacity, like newcomers (swarmnet/placement/policy.py).
- Contributions take their part of the links (exchange.py).
- The maximum flow of the whole swarm on the rest is that of its thinnest stage (playing.py, visits.py).
- A simulation finds the share of it that real routing reaches (playing.py), and the cost of churn (churn.py).

A run with a full-path warm-up is simulated twice, with and without skipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from peers.config.errors import UserError
from peers.lab.planner.churn import computed, turnover
from peers.lab.planner.exchange import Exchange, alone_memory, charged, exchange_of
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
    """A part of the run: the full-path warm-up, or the rounds after it."""

    layout: SwarmLayout
    """Layout of the whole swarm."""
    placement: Placement
    course: Course
    """Path on the bandwidth that contributions leave."""
    most: tuple[float, float, float]
    """Bounds in tokens per second: by compute alone, by links, and by links with contributions."""
    played: Played
    simulated: int
    churn: Churn
    tokens_per_second: float

    @property
    def churned(self) -> float:
        """Return the tokens per second with churn."""
        return self.tokens_per_second * (1 - self.churn.costs)


def plan(manifest: Manifest, question: PlanRequest, exchange: Exchange | None = None) -> PlanResult:
    """Return the plan of a run. `exchange`: replaces the one that the manifest defines.

    Raises UserError if there are too few peers, or if they are too slow to train anything.
    """
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
        visited=later.played.visited,
        simulated=later.simulated,
        most=beside,
        tokens_per_second=later.tokens_per_second,
        churned=later.churned,
        churn=later.churn,
        full_path_warmup_rounds=full_path_warmup_rounds,
        whole=whole,
        target=target,
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
    )


def _target(manifest: Manifest) -> int:
    """Return the tokens until the learning rate has decayed."""
    return manifest.sync.decay_rounds * manifest.rounds.global_batch_tokens


def summed(question: PlanRequest) -> float:
    """Return the tokens per second of all peers together, if each computed the whole model."""
    total = sum(one.count * one.tokens_per_second for one in question.classes)
    fastest = max(one.tokens_per_second for one in question.classes)
    return min(total, question.cores * fastest) if question.cores else total


def alone(manifest: Manifest, question: PlanRequest) -> SinglePeerBaseline:
    """Return the fastest peer with memory for the whole model; if there is none, the fastest peer."""
    needs = alone_memory(manifest)
    found = [SinglePeerBaseline(one.tokens_per_second, needs, one.memory) for one in question.classes]
    return max(found, key=lambda one: (one.fits, one.tokens_per_second))


def _stretch(
    manifest: Manifest, question: PlanRequest, exchange: Exchange, rules: PathRules | None, plays: int
) -> PlanPhase:
    """Plan one part of the run. `rules`: how microbatches skip stages; None: they skip none."""
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
            question.churn * len(peers),
            played.churn_costs,
            computed(away_of_all, whole, way.visited, WINDOW * way.path),
            played.deaths,
            away.hastened(),
        )
    rate = min(1.0, played.rate / its_way.most) * bounds[-1]  # Over 1 by random compute times.
    found = PlanPhase(whole, placement, way, bounds, played, len(some), churn, rate)
    if found.churned <= 0:
        why = "with so much churn" if rate > 0 else "over such links, or by peers so slow"
        raise UserError(f"nothing is trained {why}: no microbatch came back to where it started")
    return found


def lay_out(
    manifest: Manifest,
    question: PlanRequest,
    exchange: Exchange,
    peers: Sequence[PeerSpec],
    rules: PathRules | None,
) -> tuple[SwarmLayout, tuple[float, float, float]]:
    """Return the layout with the bandwidth of contributions taken off, and three bounds in tokens per second.

    The bounds are: by compute alone, by links, and by links with contributions.
    """
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
    body = (manifest.body_bytes + manifest.gradient_bytes) // 2  # Text goes forward only.
    header = len(encode(Act("x" * 52, 10**6, 1, 1, 10.0, shape)))
    links, regions = question.between(), [peer.region for peer in peers]
    if rules is not None:  # The layout is for the time after the full-path warm-up.
        rules = replace(rules, full_path_warmup_rounds=0)
    return SwarmLayout(
        tuple(peers),
        links.between(regions, question.seed),
        Work(wire_bytes(header, body), BACKWARD_RATIO),
        cores=question.cores,
        rules=rules,
        connection=None if question.cores else links.carried(regions),
    )


def _updates(
    manifest: Manifest,
    exchange: Exchange,
    stages: Sequence[Sequence[int]],
    committed: Sequence[float],
    full: bool = False,
) -> list[float]:
    """Return the bytes per second of contributions at a peer of each stage, the same up and down.

    `committed`: tokens per second of each stage. `full`: assume that every peer contributes to every round,
    and that each round has `global_batch_tokens`.
    """
    groups = [
        (stage, len(peers), rate) for stage, (peers, rate) in enumerate(zip(stages, committed, strict=True))
    ]
    if full:
        rounds = manifest.rounds.global_batch_tokens
        return [exchange.per_round(stage, group) * rate / rounds for stage, group, rate in groups]
    return [exchange.per_second(manifest, stage, rate, group) for stage, group, rate in groups]


def _data_bytes(layout: SwarmLayout, committed: Sequence[float]) -> tuple[float, ...]:
    """Return the mean bytes of bodies that a peer of each stage sends in a day.

    `committed`: microbatches per second of each stage. The first and the last stage send one body for each
    microbatch, the others two.
    """
    stages = layout.stages()
    return tuple(
        rate * layout.crossing(stage).sent / len(peers) * DAY
        for stage, (rate, peers) in enumerate(zip(committed, stages, strict=True))
    )


def _line_share(layout: SwarmLayout, rates: Sequence[float]) -> float:
    """Return the largest share of a link that `rates` take, in bytes per second by stage."""
    lines = [min(peer.up, peer.down) for peer in layout.peers]
    slowest = [min(lines[peer] for peer in peers) for peers in layout.stages()]
    return max(rate / line for rate, line in zip(rates, slowest, strict=True))


def _seconds(
    manifest: Manifest, target: int, full_path_warmup_rounds: int, whole: float, later: float
) -> float:
    """Return the seconds to train `target` tokens.

    The speed in tokens per second is `whole` in the warm-up rounds, and `later` after them.
    """
    if not full_path_warmup_rounds:
        return target / later
    at_first = min(target, full_path_warmup_rounds * whole / rounds_per_second(manifest, whole))
    return at_first / whole + (target - at_first) / later
