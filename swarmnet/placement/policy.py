"""Load balancing between stages: which stage a newcomer takes, and which peer moves from a rich stage to a
poor one.

SWARM's rebalancing (arXiv:2301.11913, section 3.2) compares queue lengths and moves one peer each period. The
stage with the longest queue is the one with the least *capacity*: how many of the run's microbatches its
peers can carry together. Capacity decides here, because it shows how many peers a stage lacks, while a queue
ends at its number of slots. Several peers may therefore move at once without overshoot. If microbatches skip
stages, a stage serves only a share of them and so carries more of the run's. A peer is limited by its link as
well as by its computer (resources/lines.py): middle stages send twice.

A peer sees only what others published some time ago (`View`). It announces that it would move, waits and
looks again. It goes if the move is still right when all announced moves are carried out, in an order that all
peers compute alike. Before it leaves, a peer of its stage that stays must confirm that it knows
(`GroupBeat`). If all peers of a stage want to leave, the last one finds none that stays: a move never empties
a stage. All times are in seconds on the caller's clock, capacities in microbatches of the run per second.
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
    snapshot_interval: int = 16
    """Rounds until the run's first snapshot (`Rounds.snapshot_interval`)."""

    def does(self, stage: int, speed: float, line: LinkBandwidth) -> float:
        """Return the microbatches per second of a peer at a stage. `speed`: its work per second."""
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
    """What one peer knows of all stages. `capacities` still count moving peers where they are."""

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
    """True if links are taken into account (`lines_count`)."""
    most_bring: tuple[float, ...] = ()
    """What peers would carry at each stage on average (`usually`); empty: as much as the median peer."""
    there: tuple[int, ...] = ()
    """Number of peers at each stage; empty: not counted."""
    stuck: frozenset[int] = frozenset()
    """Stages in which all peers wait for weights: their capacity is 0."""

    def capacity(self, rules: MoveRules, stage: int, speed: float, line: LinkBandwidth) -> float:
        """Return the run's microbatches per second that a peer sustains at a stage, with those that skip
        it."""
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


def view_of(seen: Iterable[tuple[PeerId, ObservedPeer]], rules: MoveRules) -> View:
    """Return the view that follows from the fresh records. A peer without a measurement counts as a median
    one, and none for more than `FASTEST` times that."""
    work = rules.work
    peers = [
        (peer, record)
        for peer, record in seen
        if 0 <= record.stage < len(work) and record.age_seconds <= FRESH_SECONDS
    ]
    speeds = [record.rate * work[record.stage] for _, record in peers if record.rate > 0]
    usual = median(speeds) if speeds else 1.0
    lines = [record.line for _, record in peers]
    middle = UNKNOWN
    if lines:
        middle = LinkBandwidth(median_low(line.up for line in lines), median_low(line.down for line in lines))
    shares = _shares([record for _, record in peers], rules)
    known = View((), (), len(peers), usual, shares, middle, lines_count(rules, len(peers), middle))
    stuck = frozenset(stuck_stages([record for _, record in peers], rules.snapshot_interval))
    capacities, intents = [0.0] * len(work), []
    all_bring: list[list[float]] = []
    for peer, record in peers:
        speed = min(record.rate * work[record.stage] or usual, FASTEST * usual)
        if known.by_lines and record.line.is_known:
            all_bring.append([known.capacity(rules, stage, speed, record.line) for stage in range(len(work))])
        carries = known.capacity(rules, record.stage, speed, record.line)
        leaves = 0.0 if record.stage in stuck else carries
        capacities[record.stage] += leaves
        if 0 <= record.moving_to < len(work) and record.moving_to != record.stage:
            brings = known.capacity(rules, record.moving_to, speed, record.line)
            intents.append(Intent(peer, record.stage, record.moving_to, leaves, brings))
    counts = Counter(record.stage for _, record in peers)
    there = tuple(counts[stage] for stage in range(len(work)))
    found = replace(known, capacities=tuple(capacities), intents=tuple(intents), there=there, stuck=stuck)
    return replace(found, most_bring=usually(all_bring)) if all_bring else found


def lines_count(rules: MoveRules, peers: int, usual: LinkBandwidth) -> bool:
    """Return whether links are taken into account: whether a further peer helps a stage whose links are full.

    In a group of n, contributions leave n (link - n gossip) of n links. This grows until they take half of
    each link. From there on peers are placed by compute alone."""
    return rules.gossip * (peers / len(rules.work) - 1) <= usual.up / 2


def _shares(seen: Iterable[ObservedPeer], rules: MoveRules) -> tuple[float, ...]:
    """Return the share of microbatches that visits each stage, from the manifest and the round of the first
    stage.

    Measured shares would mislead: microbatches go around a poor stage, which would look as if it needed no
    peers. Peers without a measured rate may not be in step yet, so their round is ignored."""
    paths = rules.paths
    if paths is None:
        return ()
    rounds = [record.round for record in seen if record.stage == 0 and record.rate > 0]
    round = median_high(rounds) if rounds else 0
    return tuple(paths.visit_share(stage, round) for stage in range(len(rules.work)))


def worthwhile(
    capacities: Sequence[float], intent: Intent, rules: MoveRules, download_seconds: float, one: float
) -> bool:
    """Return whether the poorer of the two stages is clearly better off after a move.

    An empty stage stops the whole swarm, so any peer may go there that does not leave its own stage empty.
    `one`: what a median peer would bring."""
    before = capacities[intent.target]
    if before <= 0:
        return intent.brings > 0 and capacities[intent.source] - intent.leaves > LEFT_BEHIND * intent.leaves
    brings = intent.brings * max(0.0, 1.0 - download_seconds / rules.horizon_seconds)
    after = min(capacities[intent.source] - intent.leaves, before + brings)
    uneven = capacities[intent.source] >= (1 + rules.slack) * before
    least = min(rules.margin * max(intent.brings, one), rules.enough * max(before, one))
    return uneven and after - before >= least


def carried_out(
    view: View, rules: MoveRules, download_seconds: float
) -> tuple[list[float], frozenset[PeerId]]:
    """Return the capacities after the announced moves, and the peers that go. The moves are tried in an order
    given by a hash of the names, and each is carried out if it is still worthwhile."""
    capacities, going = list(view.capacities), set()
    for intent in sorted(view.intents, key=_rank):
        one = view.one(rules, intent.target)
        if worthwhile(capacities, intent, rules, download_seconds, one):
            capacities[intent.source] -= intent.leaves
            capacities[intent.target] += intent.brings
            going.add(intent.peer)
    return capacities, frozenset(going)


def _rank(intent: Intent) -> bytes:
    """Return the key that orders announced moves."""
    return hashlib.blake2b(f"{intent.peer}/{intent.target}".encode(), digest_size=8).digest()


def choose_stage(view: View, rules: MoveRules, chance: Random) -> int:
    """Return the stage that needs a newcomer most, among those that it can serve.

    Stages with the most untrained experts come first. Among these the one wins that has the least capacity
    after all announced moves, as it looks to this newcomer (`as_suited`). In an empty swarm the choice is
    random, so that peers spread. Raises `ValueError` if the peer can serve no stage.
    """
    capacities = _as_seen(view, carried_out(view, rules, 0.0)[0], rules, view.usual)
    stages = [stage for stage in range(len(capacities)) if stage not in rules.never]
    if not stages:
        raise ValueError(f"none of {len(capacities)} stages can be served")
    frozen = {stage: view.frozen(rules, stage) for stage in stages}
    most_frozen = max(frozen.values())
    best = [stage for stage in stages if frozen[stage] == most_frozen]
    least = min(capacities[stage] for stage in best)
    best = [stage for stage in best if capacities[stage] <= least * TIE]
    if view.stuck:  # Stages without capacity are equal: waiting peers spread over them.
        fewest = min(view.there[stage] for stage in best)
        best = [stage for stage in best if view.there[stage] == fewest]
    return chance.choice(best)


def as_suited(capacities: Sequence[float], brings: Sequence[float], usual: Sequence[float]) -> list[float]:
    """Return the stages' capacities as they look to one peer: lower where the stage suits it better than
    most.

    `brings` is what it would carry at each stage, `usual` what peers usually carry. Good links thus go to the
    middle stages, and the others to the end stages."""
    return [
        capacity / (own / one) ** SUITED if own > 0 and one > 0 else capacity
        for capacity, own, one in zip(capacities, brings, usual, strict=True)
    ]


def usually(brings: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the geometric mean of what peers would bring to each stage. A peer with false reports then
    shifts the ratio of two stages by no more than their bytes differ."""
    return tuple(exp(sum(map(log, at)) / len(at)) for at in zip(*brings, strict=True))


def _as_seen(view: View, capacities: Sequence[float], rules: MoveRules, speed: float) -> list[float]:
    """Return the capacities as they look to a peer of that speed, with its link or a median one."""
    stages, line = range(len(capacities)), rules.line if rules.line.is_known else view.usual_line
    brings = [view.capacity(rules, stage, speed, line) for stage in stages]
    return as_suited(capacities, brings, view.most_bring or [view.one(rules, stage) for stage in stages])


def _poorest(capacities: Sequence[float], never: frozenset[int]) -> list[int]:
    """Return the poorest stages that a peer can serve."""
    served = {stage: capacity for stage, capacity in enumerate(capacities) if stage not in never}
    least = min(served.values())
    return [stage for stage, capacity in served.items() if capacity <= least * TIE]


def choose_move(
    view: View, me: PeerId, stage: int, rate: float, rules: MoveRules, download_seconds: float,
    chance: Random, passed_over: int = 0, on_disk: frozenset[int] = frozenset(),
) -> Intent | None:  # fmt: skip
    """Return the move that this peer should announce, from one of the richest stages to one of the poorest;
    None: stay.

    `rate`: its microbatches per second at its stage; 0: not measured yet. `passed_over`: number of richer
    stages that are not waited for. `on_disk`: stages whose weights it has. A peer moves to a stuck stage only
    with its weights, because without them it would wait there, too."""
    if rules.groups > 1 and view.there and view.there[stage] <= rules.groups:
        return None  # Some experts here would have no peer.
    others = replace(view, intents=tuple(intent for intent in view.intents if intent.peer != me))
    capacities, _ = carried_out(others, rules, download_seconds)
    closed = rules.never | (view.stuck - on_disk)
    restored = [place for place in sorted(on_disk - rules.never) if capacities[place] <= 0]
    poorest = min((value for place, value in enumerate(capacities) if place not in closed), default=1.0)
    speed = rate * rules.work[stage]
    if rate <= 0:
        if poorest > 0:
            return None  # It will have measured soon.
        speed = view.usual  # While a stage is empty, no peer measures anything.
    if view.usual > 0:
        speed = min(speed, FASTEST * view.usual)  # Others count it so.
    leaves = view.capacity(rules, stage, speed, rules.line)
    poor = restored or _poorest(_as_seen(view, capacities, rules, speed), closed)
    target = chance.choice(poor)
    one = view.one(rules, target)

    def goes_first(other: int) -> bool:
        """Return whether a median peer of `other` would move, and goes first because its stage is richer."""
        usual = Intent(me, other, target, view.one(rules, other), one)
        richer = capacities[other] > capacities[stage] + leaves
        return richer and worthwhile(capacities, usual, rules, download_seconds, one)

    if poorest > 0 and sum(map(goes_first, range(len(capacities)))) > passed_over:
        return None  # Peers of the richest stage go first, or some would move twice.
    intent = Intent(me, stage, target, leaves, view.capacity(rules, target, speed, rules.line))
    if target == stage or not worthwhile(capacities, intent, rules, download_seconds, one):
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
        stage_work(manifest), never=never, paths=manifest.path_rules(), crossings=crossings(manifest),
        gossip=gossip_per_peer(manifest), line=line, groups=manifest.model.experts.groups,
        snapshot_interval=manifest.rounds.snapshot_interval,
    )  # fmt: skip


def stage_work(manifest: Manifest) -> tuple[float, ...]:
    """Return the multiplications per token of each stage, in units of one decoder layer. They are those of
    the layer's matrices, and of attention to half of the sequence. An embedding lookup costs nothing."""
    model = manifest.model
    heads = model.num_attention_heads * model.head_dim
    projections = model.hidden_size * (2 * heads + 2 * model.num_key_value_heads * model.head_dim)
    attention = manifest.data.seq_len * heads
    feeds = 3 * model.hidden_size * model.active_feed_forward
    layer = projections + attention + feeds
    work = [float(layers) for layers in manifest.stages]
    work[-1] += model.hidden_size * model.vocab_size / layer
    return tuple(work)
