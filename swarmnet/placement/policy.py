"""Load balancing between stages: which stage a newcomer takes, and which peer moves from a rich stage to a
poor one.

The *capacity* of a stage is how many of the run's microbatches its peers can carry per second. Stages with
capacities of 9, 4 and 9 let 4 pass, so a peer should move to the middle one. SWARM's rebalancing
(arXiv:2301.11913, section 3.2) compares queue lengths and moves one peer each period. Capacity also shows how
many peers a stage lacks, so several may move at once. If microbatches skip stages, a stage serves only a
share of them, which raises its capacity. A peer is limited by its computer and by its network link (*line*,
resources/link_bandwidth.py): middle stages send twice.

A peer sees only what others published some time ago (`View`). It announces that it would move (`Intent`: what
the old stage loses and what the new one gets), waits and *looks* again. The announced moves are applied in an
order that all peers compute alike. The peer goes if its move is then still right. Before it leaves, a peer of
its stage that stays must confirm that it knows. If all peers of a stage want to leave, the last one finds
none that stays: a move never empties a stage. A stage is *stuck* if all its peers wait for weights. Times are
in seconds, speeds in units of work per second.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from random import Random
from statistics import median, median_high, median_low

from swarmnet.identifiers import PeerId
from swarmnet.placement.standstill import stuck_stages
from swarmnet.resources.bandwidth_estimate import gossip_per_peer
from swarmnet.resources.link_bandwidth import UNKNOWN, Crossing, LinkBandwidth, carried, crossings
from swarmnet.run.manifest import Manifest
from swarmnet.run.path_rules import PathRules

PERIOD_SECONDS_PER_PEER = 0.75
"""Seconds between looks for each peer of the swarm. A look reads all records of the run, so bytes per peer
and second stay equal. At 400 peers this gives the 300 s of SWARM."""
SHORTEST_PERIOD_SECONDS = 15.0
LONGEST_PERIOD_SECONDS = 300.0
TIE = 1.05
"""Stages within this factor of the least capacity are equally poor, as speeds scatter by as much."""
FRESH_SECONDS = 45.0
"""Age beyond which records are ignored. Peers sign one every 30 s, and it is listed for 120 s, mostly too
long for a peer that died. Leaving out a peer that is a little late does less harm."""
LEFT_BEHIND = 1e-6
"""Least capacity that must remain where a peer leaves, as a fraction of its own: more than rounding errors,
less than any peer."""
FASTEST = 16.0
"""Speeds count for at most this many times the median: more than the spread of honest peers, and a bound on
false reports. A link only ever lowers what a speed counts for."""
SUITED = 0.25
"""A stage that suits a peer twice as well as most peers looks poorer to it by 2 to this power. With more, the
poorest stage waits; with less, good links end up at the end stages (docs/benchmarks/home_lines.md)."""


@dataclass(frozen=True, slots=True)
class MoveRules:
    """The thresholds of moves. `work`: compute of a microbatch at each stage that it visits, in any unit."""

    work: tuple[float, ...]
    margin: float = 0.25
    """Least gain of the poorer stage, as a fraction of what the moving peer brings, or a median one if that
    is more. A move costs a download and an absence. At 0, a difference of one peer would be passed on without
    end. At 1, only differences of two exactly known speeds would justify a move."""
    enough: float = 0.08
    """Or least gain as a fraction of the poorer stage's capacity. In a small swarm a fraction of a peer is a
    good part of the throughput. Speeds scatter by 5 %, a stage of three by 3 %: this is not chance."""
    slack: float = 0.02
    """Least difference of the two stages, as a fraction: 10,000 peers must not even out single ones."""
    recheck_seconds: tuple[float, float] = (6.0, 16.0)
    """Seconds from announcing to looking again, drawn. At the lower bound all have seen the record."""
    confirm_seconds: float = 5.0
    """Seconds that a peer of the same stage has to confirm: a few heartbeats."""
    cool_down_seconds: float = 60.0
    """Least stay after a download, or ten times the download if that is longer. It doubles with each of the
    first three moves, so that no peer moves without end."""
    horizon_seconds: float = 1800.0
    """How long an imbalance lasts if no peer moves: newcomers choose by the same rule and correct it. The
    download of a moving peer is lost from this time."""
    never: frozenset[int] = frozenset()
    """Stages that this peer cannot serve, and to which it never moves."""
    paths: PathRules | None = None
    """Rules by which microbatches may skip stages; None: they skip none."""
    crossings: tuple[Crossing, ...] = ()
    """Bytes of a microbatch over the link at each stage; empty: links are ignored."""
    gossip: float = 0.0
    """Bytes per second by which each further peer of a group loads the link of every peer in it."""
    line: LinkBandwidth = UNKNOWN
    """The link of this peer."""
    groups: int = 1
    """Expert groups of the model; a peer trains one of them."""
    rounds_from_seed: int = 20
    """Rounds in which a stage without weights begins from the seed (`Rounds.rounds_from_seed`)."""

    def does(self, stage: int, speed: float, line: LinkBandwidth) -> float:
        """Return the microbatches per second that a peer's compute (`speed`) and link allow at a stage."""
        each = self.crossings[stage] if self.crossings else Crossing()
        return carried(speed / self.work[stage], line, each)

    def cool_down(self, download_seconds: float, moved: int) -> float:
        """Return the cool-down in seconds after a download, for a peer that has moved `moved` times."""
        return max(self.cool_down_seconds, 10 * download_seconds) * 2.0 ** min(moved, 3)


@dataclass(frozen=True, slots=True)
class ObservedPeer:
    """One peer as its newest record shows it."""

    stage: int
    """The stage that it serves, or fetches in order to serve."""
    rate: float
    """Microbatches per second that it can carry at that stage; 0: not measured yet."""
    moving_to: int = -1
    age_seconds: float = 0.0
    """Seconds since the record was signed."""
    round: int = 0
    """The round of its stage."""
    line: LinkBandwidth = UNKNOWN
    """Its link, as it reports it."""
    waits: bool = False
    """True if it has no weights yet."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A move that was announced."""

    peer: PeerId
    source: int
    target: int
    leaves: float
    """Capacity that `source` loses."""
    brings: float
    """Capacity that `target` gets."""


@dataclass(frozen=True, slots=True)
class View:
    """What one peer knows of all stages. `capacities` count peers with an announced move where they are."""

    capacities: tuple[float, ...]
    intents: tuple[Intent, ...] = ()
    peers: int = 0
    usual: float = 0.0
    """Median speed in units of work per second."""
    shares: tuple[float, ...] = ()
    """Share of the run's microbatches that visits each stage; empty: all visit all."""

    usual_line: LinkBandwidth = UNKNOWN
    """Median link, separately up and down; the lower middle value of an even number."""
    by_lines: bool = True
    """True if links are taken into account (`considers_links`)."""
    most_bring: tuple[float, ...] = ()
    """What peers would carry at each stage on average (`usually`); empty: as much as the median peer."""
    there: tuple[int, ...] = ()
    """Number of peers at each stage; empty: not counted."""
    stuck: frozenset[int] = frozenset()
    """Stages in which all peers wait for weights: their capacity is 0."""

    def capacity(self, rules: MoveRules, stage: int, speed: float, line: LinkBandwidth) -> float:
        """Return how many of the run's microbatches per second a peer sustains at a stage. Microbatches that
        skip the stage count too: if half of them visit it, a peer sustains twice its own rate."""
        counted = line if self.by_lines else UNKNOWN
        return rules.does(stage, speed, counted) / (self.shares[stage] if self.shares else 1.0)

    def frozen(self, rules: MoveRules, stage: int) -> float:
        """Return the fraction of a stage's expert groups that no peer trains, for lack of peers."""
        if rules.groups == 1 or not self.there:
            return 0.0
        return max(0.0, 1.0 - self.there[stage] / rules.groups)

    def one(self, rules: MoveRules, stage: int) -> float:
        """Return the capacity of a median peer at a stage."""
        return self.capacity(rules, stage, self.usual, self.usual_line)


def summarize_records(seen: Iterable[tuple[PeerId, ObservedPeer]], rules: MoveRules) -> View:
    """Return the capacities of all stages, the announced moves and the medians, from the peers' records that
    are at most `FRESH_SECONDS` old. A peer without a measured rate counts as a median one. No peer counts for
    more than `FASTEST` times the median. Stuck stages have the capacity 0."""
    work = rules.work
    peers = [
        (peer, record)
        for peer, record in seen
        if 0 <= record.stage < len(work) and record.age_seconds <= FRESH_SECONDS
    ]
    speeds = [record.rate * work[record.stage] for _, record in peers if record.rate > 0]
    usual = median(speeds) if speeds else 1.0
    lines = [record.line for _, record in peers]
    usual_line = UNKNOWN
    if lines:
        up, down = median_low(line.up for line in lines), median_low(line.down for line in lines)
        usual_line = LinkBandwidth(up, down)
    shares = _visit_shares([record for _, record in peers], rules)
    by_lines = considers_links(rules, len(peers), usual_line)
    medians = View(
        capacities=(), peers=len(peers), usual=usual, shares=shares, usual_line=usual_line, by_lines=by_lines
    )  # Still without capacities: they are computed with these medians.
    stuck = frozenset(stuck_stages([record for _, record in peers], rules.rounds_from_seed))
    capacities, intents = [0.0] * len(work), []
    brings_by_peer: list[list[float]] = []  # What each peer with a known link would carry at each stage.
    for peer, record in peers:
        measured_speed = record.rate * work[record.stage]  # 0: not measured.
        speed = min(measured_speed or usual, FASTEST * usual)
        if by_lines and record.line.is_known:
            at_stages = [medians.capacity(rules, stage, speed, record.line) for stage in range(len(work))]
            brings_by_peer.append(at_stages)
        carries = medians.capacity(rules, record.stage, speed, record.line)
        leaves = 0.0 if record.stage in stuck else carries
        capacities[record.stage] += leaves
        if 0 <= record.moving_to < len(work) and record.moving_to != record.stage:
            brings = medians.capacity(rules, record.moving_to, speed, record.line)
            intents.append(Intent(peer, record.stage, record.moving_to, leaves, brings))
    counts = Counter(record.stage for _, record in peers)
    there = tuple(counts[stage] for stage in range(len(work)))
    view = replace(medians, capacities=tuple(capacities), intents=tuple(intents), there=there, stuck=stuck)
    return replace(view, most_bring=usually(brings_by_peer)) if brings_by_peer else view


def considers_links(rules: MoveRules, peers: int, usual: LinkBandwidth) -> bool:
    """Return whether peers are placed by their links too, not only by compute: while a further peer helps a
    stage whose links are full. `peers` is their number at all stages, `usual` the median link.

    In a group of n peers with upload `link`, each spends `gossip` per other peer on contributions. For
    microbatches n (link - n gossip) is left. This grows with n until contributions take half of each link."""
    others_in_group = peers / len(rules.work) - 1
    return rules.gossip * others_in_group <= usual.up / 2


def _visit_shares(seen: Iterable[ObservedPeer], rules: MoveRules) -> tuple[float, ...]:
    """Return the share of microbatches that visits each stage, from the manifest and the round of the first
    stage. It is empty if microbatches skip no stages.

    Measured shares would mislead: microbatches go around a poor stage, which would look as if it needed no
    peers. Peers without a measured rate may not be in step yet, so their round is ignored."""
    paths = rules.paths
    if paths is None:
        return ()
    rounds = [record.round for record in seen if record.stage == 0 and record.rate > 0]
    round = median_high(rounds) if rounds else 0
    return tuple(paths.visit_share(stage, round) for stage in range(len(rules.work)))


def worthwhile(
    capacities: Sequence[float],
    intent: Intent,
    rules: MoveRules,
    download_seconds: float,
    median_brings: float,
) -> bool:
    """Return whether a move clearly raises the lesser of the two stages' capacities.

    An empty stage stops the whole swarm. Any peer may go there that does not leave its own stage empty. Other
    moves must gain `margin` of what a peer brings, or `enough` of the target's capacity (`MoveRules`).
    `median_brings` is the capacity that a median peer would bring to the target. The time of the download is
    deducted from what the moving peer brings."""
    before = capacities[intent.target]
    left_at_source = capacities[intent.source] - intent.leaves
    if before <= 0:
        return intent.brings > 0 and left_at_source > LEFT_BEHIND * intent.leaves
    brings = intent.brings * max(0.0, 1.0 - download_seconds / rules.horizon_seconds)
    lesser_after = min(left_at_source, before + brings)
    is_uneven = capacities[intent.source] >= (1 + rules.slack) * before
    least_gain_by_peer = rules.margin * max(intent.brings, median_brings)
    least_gain_by_stage = rules.enough * max(before, median_brings)
    return is_uneven and lesser_after - before >= min(least_gain_by_peer, least_gain_by_stage)


def apply_announced_moves(
    view: View, rules: MoveRules, download_seconds: float
) -> tuple[list[float], frozenset[PeerId]]:
    """Return the capacities after the announced moves, and the peers that move. The moves are tried in an
    order that all peers compute alike. A move counts only if it is worthwhile after those before it."""
    capacities, moving_peers = list(view.capacities), set()
    for intent in sorted(view.intents, key=_order_of_move):
        median_brings = view.one(rules, intent.target)
        if worthwhile(capacities, intent, rules, download_seconds, median_brings):
            capacities[intent.source] -= intent.leaves
            capacities[intent.target] += intent.brings
            moving_peers.add(intent.peer)
    return capacities, frozenset(moving_peers)


def _order_of_move(intent: Intent) -> bytes:
    """Return the sort key of an announced move: a hash of its peer and target."""
    return hashlib.blake2b(f"{intent.peer}/{intent.target}".encode(), digest_size=8).digest()


def choose_stage(view: View, rules: MoveRules, chance: Random) -> int:
    """Return the stage that needs a newcomer most, among those that it can serve.

    Stages with the most untrained experts come first. Among these the stage with the least capacity after all
    announced moves is chosen. A stage that suits the newcomer's link well counts as poorer (`as_suited`).
    Chance decides between equally poor stages, so that peers spread. If some stage is stuck, only those of
    them with the fewest peers remain. Raises ValueError if the peer can serve no stage.
    """
    after_moves, _ = apply_announced_moves(view, rules, 0.0)
    capacities = _as_suited_to_peer(view, after_moves, rules, view.usual)
    stages = [stage for stage in range(len(capacities)) if stage not in rules.never]
    if not stages:
        raise ValueError(f"none of {len(capacities)} stages can be served")
    untrained = {stage: view.frozen(rules, stage) for stage in stages}
    most_untrained = max(untrained.values())
    best = [stage for stage in stages if untrained[stage] == most_untrained]
    least = min(capacities[stage] for stage in best)
    best = [stage for stage in best if capacities[stage] <= least * TIE]
    if view.stuck:  # Stages without capacity are equal: waiting peers spread over them.
        fewest = min(view.there[stage] for stage in best)
        best = [stage for stage in best if view.there[stage] == fewest]
    return chance.choice(best)


def as_suited(capacities: Sequence[float], brings: Sequence[float], usual: Sequence[float]) -> list[float]:
    """Return the stages' capacities, lowered for stages that suit one peer better than most, and raised for
    the others. A peer then prefers the stage with the lowest capacity. `brings` is what the peer would carry
    at each stage, `usual` what peers usually carry there. Good links thus go to the middle stages, and the
    others to the end stages."""
    suited = []
    for capacity, own, others in zip(capacities, brings, usual, strict=True):
        if own > 0 and others > 0:
            capacity /= (own / others) ** SUITED
        suited.append(capacity)
    return suited


def usually(brings: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return, for each stage, the geometric mean of the capacities that peers would bring to it. `brings` has
    one row per peer and one column per stage. With this mean, a false report of a link shifts the ratio of
    two stages by no more than their bytes per microbatch differ."""
    return tuple(exp(sum(map(log, at_stage)) / len(at_stage)) for at_stage in zip(*brings, strict=True))


def _as_suited_to_peer(
    view: View, capacities: Sequence[float], rules: MoveRules, speed: float
) -> list[float]:
    """Return the stages' capacities as they look to this peer, which works at `speed`: lower for stages that
    suit its link better than most (`as_suited`). An unknown link counts as the median one."""
    stages = range(len(capacities))
    line = rules.line if rules.line.is_known else view.usual_line
    brings = [view.capacity(rules, stage, speed, line) for stage in stages]
    usual_brings = view.most_bring or [view.one(rules, stage) for stage in stages]
    return as_suited(capacities, brings, usual_brings)


def _poorest_stages(capacities: Sequence[float], excluded: frozenset[int]) -> list[int]:
    """Return the stages of least capacity, up to the factor `TIE`, among those that are not excluded."""
    allowed = {stage: capacity for stage, capacity in enumerate(capacities) if stage not in excluded}
    least = min(allowed.values())
    return [stage for stage, capacity in allowed.items() if capacity <= least * TIE]


def choose_move(
    view: View,
    me: PeerId,
    stage: int,
    rate: float,
    rules: MoveRules,
    download_seconds: float,
    chance: Random,
    passed_over: int = 0,
    on_disk: frozenset[int] = frozenset(),
) -> Intent | None:
    """Return the move that this peer should announce, from `stage` to one of the poorest stages; None: stay.

    Peers of richer stages go first: this one stays while more than `passed_over` richer stages would send a
    peer. `rate`: its microbatches per second at `stage`; 0: not measured yet. `on_disk`: stages whose weights
    it has. A peer moves to a stuck stage only with its weights; without them it would wait there, too."""
    if rules.groups > 1 and view.there and view.there[stage] <= rules.groups:
        return None  # With fewer peers than expert groups, some experts would not be trained.
    others = replace(view, intents=tuple(intent for intent in view.intents if intent.peer != me))
    capacities, _ = apply_announced_moves(others, rules, download_seconds)
    excluded = rules.never | (view.stuck - on_disk)
    if len(excluded) == len(capacities):
        return None
    # Empty stages whose weights are on this peer's disk come before the poorest ones.
    restorable = [place for place in sorted(on_disk - rules.never) if capacities[place] <= 0]
    poorest = min((value for place, value in enumerate(capacities) if place not in excluded), default=1.0)
    speed = rate * rules.work[stage]
    if rate <= 0:
        if poorest > 0:
            return None  # Its speed will be measured soon.
        speed = view.usual  # While a stage is empty, no peer measures anything.
    if view.usual > 0:  # Other peers limit this speed in the same way (`summarize_records`).
        speed = min(speed, FASTEST * view.usual)
    leaves = view.capacity(rules, stage, speed, rules.line)
    targets = restorable or _poorest_stages(_as_suited_to_peer(view, capacities, rules, speed), excluded)
    target = chance.choice(targets)
    median_brings = view.one(rules, target)

    def goes_first(other: int) -> bool:
        """Return whether a median peer of `other` would move, and goes first because its stage is richer."""
        median_move = Intent(me, other, target, view.one(rules, other), median_brings)
        is_richer = capacities[other] > capacities[stage] + leaves
        return is_richer and worthwhile(capacities, median_move, rules, download_seconds, median_brings)

    if poorest > 0:
        stages_before_this = sum(map(goes_first, range(len(capacities))))
        if stages_before_this > passed_over:
            return None  # If they did not go first, some peers would move twice.
    intent = Intent(me, stage, target, leaves, view.capacity(rules, target, speed, rules.line))
    if target == stage or not worthwhile(capacities, intent, rules, download_seconds, median_brings):
        return None
    return intent


def period_seconds(peers: int) -> float:
    """Return the seconds between looks of a peer in a swarm of `peers`."""
    return min(LONGEST_PERIOD_SECONDS, max(SHORTEST_PERIOD_SECONDS, PERIOD_SECONDS_PER_PEER * peers))


def move_rules(
    manifest: Manifest, never: frozenset[int] = frozenset(), line: LinkBandwidth = UNKNOWN
) -> MoveRules:
    """Return the rules of a run, for a peer with that link that cannot serve the stages in `never`."""
    return MoveRules(
        stage_work(manifest),
        never=never,
        paths=manifest.path_rules(),
        crossings=crossings(manifest),
        gossip=gossip_per_peer(manifest),
        line=line,
        groups=manifest.model.experts.groups,
        rounds_from_seed=manifest.rounds.rounds_from_seed,
    )


def stage_work(manifest: Manifest) -> tuple[float, ...]:
    """Return the multiplications per token of each stage, in units of one decoder layer. A layer counts its
    matrices, and attention to half of the sequence. The stage with the output head counts it, too. An
    embedding lookup costs nothing."""
    model = manifest.model
    heads = model.num_attention_heads * model.head_dim
    projections = model.hidden_size * (2 * heads + 2 * model.num_key_value_heads * model.head_dim)
    attention = manifest.data.seq_len * heads
    feed_forward = 3 * model.hidden_size * model.active_feed_forward
    layer = projections + attention + feed_forward
    work = [float(layers) for layers in manifest.stages]
    work[0 if manifest.is_u_shaped else -1] += model.hidden_size * model.vocab_size / layer
    return tuple(work)
