"""What a run could do with given peers: tokens per second, days, bytes, the weakest stage, churn's price.

Speeds become seconds per microbatch and stage by counting the stage's matrix products; peers go to the stage
that has least (as newcomers do, swarmnet/placement/policy.py); the maximum flow of the whole swarm is exact
(max_flow.py, visits.py), and what share of it real routing reaches is played (playing.py), with and without
churn (churn.py). A run that begins whole and then skips is played both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from peers.errors import UserError
from peers.lab.planner.churn import computed, turnover
from peers.lab.planner.layout import Layout, PeerSpec, Work
from peers.lab.planner.placing import placed, sample
from peers.lab.planner.playing import WINDOW, Course, Played, course, play, playable
from peers.lab.planner.question import BACKWARD_RATIO, Answer, Churn, Question
from peers.lab.processes.demo_report import contribution_bytes
from protocols.framing.frames import wire_bytes
from protocols.messages.table import Act, encode
from swarmnet.resources.bandwidth_estimate import contributions_per_second, rounds_per_second
from swarmnet.run.activation_sizes import encoded_bytes
from swarmnet.run.manifest import Manifest
from swarmnet.run.path_rules import Rules

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the run in which microbatches visit equally many stages."""

    layout: Layout
    """Of the whole swarm."""
    course: Course
    played: Played
    simulated: int
    churn: Churn
    tokens_per_second: float

    @property
    def churned(self) -> float:
        return self.tokens_per_second * (1 - self.churn.costs)


def plan(manifest: Manifest, question: Question) -> Answer:
    """Raises UserError where there are too few peers, or nothing comes of them."""
    rules = manifest.path_rules()
    skips = rules.most_skipped > 0
    whole_rounds = rules.whole_rounds if skips else 0
    plays = 1 + (whole_rounds > 0)
    later = _stretch(manifest, question, rules if skips else None, plays)
    whole = 0.0
    if whole_rounds:
        calm = _stretch(manifest, replace(question, churn=0.0), None, plays)
        whole = calm.tokens_per_second * (1 - later.churn.costs)
    target = question.tokens or manifest.sync.decay_rounds * manifest.rounds.target_tokens
    tokens, stages, capacity = manifest.microbatch_tokens, later.layout.stages(), later.layout.capacity()
    committed = [later.churned * part for part in later.played.visited]
    updates = _updates(manifest, stages, committed)
    return Answer(
        peers=tuple(map(len, stages)),
        capacity=tuple(sum(capacity[peer] for peer in peers) * tokens for peers in stages),
        visited=later.played.visited, simulated=later.simulated, most=later.course.most * tokens,
        tokens_per_second=later.tokens_per_second, churned=later.churned, churn=later.churn,
        whole_rounds=whole_rounds, whole=whole, target=target,
        days=_seconds(manifest, target, whole_rounds, whole, later.churned) / DAY,
        data_bytes=_data_bytes(later.layout, [rate / tokens for rate in committed]),
        update_bytes=tuple(rate * DAY for rate in updates),
        round_seconds=tuple(1 / rounds_per_second(manifest, rate) for rate in committed),
        line_share=_line_share(later.layout, updates),
        full_line_share=_line_share(later.layout, _updates(manifest, stages, committed, full=True)),
    )  # fmt: skip


def _stretch(manifest: Manifest, question: Question, rules: Rules | None, plays: int) -> Stretch:
    """`rules`: by which microbatches leave stages out; None: by none."""
    peers = placed(manifest, question, whole=rules is None)
    whole = _layout(manifest, question, peers, rules)
    way = course(whole, question.seed)
    wanted = question.simulated or playable(whole, way, question.slots, plays, question.churn > 0)
    some = sample(peers, wanted)
    part = _layout(manifest, question, some, rules)
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
    rate = played.rate * way.most / its_way.most
    found = Stretch(whole, way, played, len(some), churn, rate * manifest.microbatch_tokens)
    if found.churned <= 0:
        why = "with so much churn" if rate > 0 else "on such lines, or of peers so slow"
        raise UserError(f"nothing is trained {why}: no microbatch came back to where it started")
    return found


def _layout(
    manifest: Manifest, question: Question, peers: Sequence[PeerSpec], rules: Rules | None
) -> Layout:
    shape = manifest.hidden_shape
    body = (manifest.body_bytes + encoded_bytes(shape, manifest.hidden_codec)) // 2  # Labels go down only.
    header = len(encode(Act("x" * 52, 10**6, 1, 1, 10.0, shape)))
    links, regions = question.between(), [peer.region for peer in peers]
    if rules is not None:  # What is asked for is the time after the rounds that are whole.
        rules = replace(rules, whole_rounds=0, most_swaps=0)
    return Layout(
        tuple(peers), links.between(regions, question.seed), Work(wire_bytes(header, body), BACKWARD_RATIO),
        cores=question.cores, rules=rules,
        connection=None if question.cores else links.carried(regions),
    )  # fmt: skip


def _updates(
    manifest: Manifest, stages: Sequence[Sequence[int]], committed: Sequence[float], full: bool = False
) -> list[float]:
    """Bytes per second that contributions take, up and down alike, at a peer of each stage. `committed`:
    tokens per second. `full`: if every peer contributed to every round, and rounds had their tokens."""
    rates = []
    for stage, (peers, rate) in enumerate(zip(stages, committed, strict=True)):
        made = contributions_per_second(manifest, rate, len(peers))
        if full:
            made = len(peers) * rate / manifest.rounds.target_tokens
        rates.append(made * (len(peers) - 1) / len(peers) * contribution_bytes(manifest, stage))
    return rates


def _data_bytes(layout: Layout, committed: Sequence[float]) -> tuple[float, ...]:
    """Per day, at a peer of each stage that commits so many microbatches per second: one body sent at the
    ends of the way, two between."""
    stages = layout.stages()
    bodies = [(stage > 0) + (stage < len(stages) - 1) for stage in range(len(stages))]
    return tuple(
        rate * count * layout.work.body_bytes / len(peers) * DAY
        for rate, count, peers in zip(committed, bodies, stages, strict=True)
    )


def _line_share(layout: Layout, rates: Sequence[float]) -> float:
    """The largest part of a line that so many bytes per second take, by stage."""
    lines = [min(peer.up, peer.down) for peer in layout.peers]
    slowest = [min(lines[peer] for peer in peers) for peers in layout.stages()]
    return max(rate / line for rate, line in zip(rates, slowest, strict=True))


def _seconds(manifest: Manifest, target: int, whole_rounds: int, whole: float, later: float) -> float:
    """Until the target, the first rounds at one pace and the rest at another; tokens per second."""
    if not whole_rounds:
        return target / later
    at_first = min(target, whole_rounds * whole / rounds_per_second(manifest, whole))
    return at_first / whole + (target - at_first) / later
