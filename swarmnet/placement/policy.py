"""Which stage a peer serves: a newcomer's choice, and moving from the least loaded stage to the most loaded.

SWARM's rebalancing (arXiv:2301.11913, section 3.2) compares queue lengths and moves one peer each period.
The stage with the longest queue is the one with the least *capacity*: how many of the run's microbatches its
peers can carry together. Capacity is what decides here: unlike a queue it does not end at a number of slots,
it says how many peers a stage lacks, and so several may move at once without overshoot. Where microbatches
leave stages out, a stage is visited by a share of them, and so carries more of the run's. What a peer can do
is bounded by its line as well as by its computer (resources/lines.py): stages in the middle send twice.

One peer sees only what others publish, some time ago (`View`). It announces that it would move, waits, looks
again, and goes if that is still right when everybody who announced goes as well, in an order that all compute
alike. Before it leaves, a peer of its stage that stays must have shown that it knows (`GroupBeat`): of peers
that leave together, the last to announce finds none that stays, so a move never empties a stage.
Times in seconds on the caller's clock, capacities in microbatches of the run per second.
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
from swarmnet.resources.lines import UNKNOWN, Crossing, Line, carried, crossings
from swarmnet.run.manifest import Manifest
from swarmnet.run.path_rules import Rules

PERIOD_SECONDS_PER_PEER = 0.75
"""Looking costs a peer all records of the run; at 400 peers this is the 300 s that SWARM recommends. Fewer
peers look as often per swarm, and the same bytes per peer and second."""
SHORTEST_PERIOD_SECONDS = 15.0
LONGEST_PERIOD_SECONDS = 300.0
TIE = 1.05
"""Stages within this factor of the least capacity are equally poor: speeds scatter by as much."""
FRESH_SECONDS = 45.0
"""Peers sign a record every 30 s, and one is listed for 120 s: of a peer that died, mostly too long. One that
is a little late and not counted does less harm."""
LEFT_BEHIND = 1e-6
"""Of its own capacity, what must be left where a peer goes from: more than rounding, less than any peer."""
FASTEST = 16.0
"""Times the median speed: more than the spread of honest peers, and an end to what a liar can claim. A line
only ever lowers what a speed counts for."""
SUITED = 0.25
"""A stage that a peer suits twice as well as most do looks poorer to it by 2 to this power. With more, the
poorest stage waits; with less, good lines end at the ends (docs/benchmarks/home_lines.md)."""


@dataclass(frozen=True, slots=True)
class MoveRules:
    """How eager peers are to move. `work`: compute of one microbatch at each stage that it visits, in any
    unit."""

    work: tuple[float, ...]
    margin: float = 0.25
    """By how much of what a peer does the poorer of the two stages must gain: at 0 a difference of one peer
    would be passed on for ever, at 1 only differences of two exactly known speeds would count. Of a usual
    peer, if the one that moves is slower: its download and its absence cost as much."""
    enough: float = 0.08
    """Or by so much of what it has: among few peers a fraction of one is a good part of the throughput.
    Speeds scatter by 5 %, a stage of three by 3: what looks like so much is not chance."""
    slack: float = 0.02
    """By how much richer the one stage must be than the other: 10,000 peers are not for ever evening out
    single ones."""
    recheck_seconds: tuple[float, float] = (6.0, 16.0)
    """From announcing to looking again, drawn. The first is longer than a record takes to be seen by all."""
    confirm_seconds: float = 5.0
    """How long a peer of the own stage has to show that it knows: a few beats."""
    cool_down_seconds: float = 60.0
    """A peer that fetched a stage stays at least so long, and ten times what that took; twice as long after
    its first move, four times after the second, at most eight times: no peer moves for ever."""
    horizon_seconds: float = 1800.0
    """How long an imbalance lasts if nobody moves: newcomers, who choose by the same rule, mend it. What a
    download takes of it is lost."""
    never: frozenset[int] = frozenset()
    """Stages that this peer cannot serve: it goes to none of them."""
    paths: Rules | None = None
    """Which stages microbatches may leave out; None: none."""
    crossings: tuple[Crossing, ...] = ()
    """Of a microbatch at each stage; empty: lines count for nothing."""
    gossip: float = 0.0
    """Bytes per second of each line that a further peer of a group costs all of it."""
    line: Line = UNKNOWN
    """This peer's."""
    groups: int = 1
    """Of experts, of which a peer trains one."""
    snapshot_rounds: int = 16
    """Rounds until the run's first snapshot (Rounds.snapshot_rounds)."""

    def does(self, stage: int, speed: float, line: Line) -> float:
        """Microbatches per second there, of a peer that does so much work per second."""
        each = self.crossings[stage] if self.crossings else Crossing()
        return carried(speed / self.work[stage], line, each)

    def cool_down(self, download_seconds: float, moved: int) -> float:
        """For a peer whose download took so long, and that has moved so often."""
        return max(self.cool_down_seconds, 10 * download_seconds) * 2.0 ** min(moved, 3)


@dataclass(frozen=True, slots=True)
class Seen:
    """One peer as its newest record shows it."""

    stage: int
    """That it serves, or fetches in order to serve."""
    rate: float
    """Microbatches that visit it, per second at that stage; 0: not measured yet."""
    moving_to: int = -1
    age_seconds: float = 0.0
    """Since it was signed."""
    round: int = 0
    """Of its stage."""
    line: Line = UNKNOWN
    """As it says."""
    waits: bool = False
    """It has no weights yet."""


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
    """What one peer knows of all stages. `capacities` still count whoever intends to move where it is."""

    capacities: tuple[float, ...]
    intents: tuple[Intent, ...] = ()
    peers: int = 0
    usual: float = 0.0
    """Median speed, in units of work per second."""
    shares: tuple[float, ...] = ()
    """Of the run's microbatches, how many visit each stage; empty: all visit all."""

    usual_line: Line = UNKNOWN
    """The middle one, up and down; of two the thinner."""
    by_lines: bool = True
    """Whether lines count (`lines_count`)."""
    most_bring: tuple[float, ...] = ()
    """What peers would carry at each stage, wherever they are (`usually`); empty: as a usual one."""
    there: tuple[int, ...] = ()
    """Peers at each stage; empty: not counted."""
    stuck: frozenset[int] = frozenset()
    """Stages in which all peers wait for weights: their capacity is 0."""

    def capacity(self, rules: MoveRules, stage: int, speed: float, line: Line) -> float:
        """Of the run's microbatches, what such a peer carries at a stage: of those that visit it and those
        that leave it out, on average."""
        counted = line if self.by_lines else UNKNOWN
        return rules.does(stage, speed, counted) / (self.shares[stage] if self.shares else 1.0)

    def frozen(self, rules: MoveRules, stage: int) -> float:
        """Of its experts, the share that nobody trains for want of peers."""
        if rules.groups == 1 or not self.there:
            return 0.0
        return max(0.0, 1.0 - self.there[stage] / rules.groups)

    def one(self, rules: MoveRules, stage: int) -> float:
        """What a usual peer would carry there."""
        return self.capacity(rules, stage, self.usual, self.usual_line)


def view_of(seen: Iterable[tuple[PeerId, Seen]], rules: MoveRules) -> View:
    """The stages' capacities by the fresh records. A peer that has measured nothing yet counts as the median
    one, and none for more than FASTEST of it."""
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
        middle = Line(median_low(line.up for line in lines), median_low(line.down for line in lines))
    shares = _shares([record for _, record in peers], rules)
    known = View((), (), len(peers), usual, shares, middle, lines_count(rules, len(peers), middle))
    stuck = frozenset(stuck_stages([record for _, record in peers], rules.snapshot_rounds))
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


def lines_count(rules: MoveRules, peers: int, usual: Line) -> bool:
    """Whether a further peer helps a stage whose lines are full. In a group of n, contributions leave
    n (line - n gossip) of n lines, which grows until they take a half. From there on peers spread by compute.
    """
    return rules.gossip * (peers / len(rules.work) - 1) <= usual.up / 2


def _shares(seen: Iterable[Seen], rules: MoveRules) -> tuple[float, ...]:
    """Where microbatches begin, the round says how much they leave out. Who has measured nothing may not be
    in step yet. By the manifest and not by what peers were given: a poor stage is gone around, and would
    look as if it needed nobody."""
    paths = rules.paths
    if paths is None:
        return ()
    rounds = [record.round for record in seen if record.stage == 0 and record.rate > 0]
    round = median_high(rounds) if rounds else 0
    return tuple(paths.visit_share(stage, round) for stage in range(len(rules.work)))


def worthwhile(
    capacities: Sequence[float], intent: Intent, rules: MoveRules, download_seconds: float, one: float
) -> bool:
    """Whether the poorer of the two stages is clearly better off after the move than before it. A stage that
    has nobody stops the whole swarm: whoever leaves somebody behind is welcome there. `one`: what a usual
    peer would bring."""
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
    """The capacities after the announced moves, and who goes: one after another in an order that follows from
    the names, each if it is still worthwhile then."""
    capacities, going = list(view.capacities), set()
    for intent in sorted(view.intents, key=_rank):
        one = view.one(rules, intent.target)
        if worthwhile(capacities, intent, rules, download_seconds, one):
            capacities[intent.source] -= intent.leaves
            capacities[intent.target] += intent.brings
            going.add(intent.peer)
    return capacities, frozenset(going)


def _rank(intent: Intent) -> bytes:
    return hashlib.blake2b(f"{intent.peer}/{intent.target}".encode(), digest_size=8).digest()


def choose_stage(view: View, rules: MoveRules, chance: Random) -> int:
    """The stage that needs a newcomer most, of those that it can serve: where most experts have nobody; among
    those the one with the least capacity, once all who announced have moved, as this newcomer sees it
    (`as_suited`). In an empty swarm any: those who start it together spread. ValueError if it can serve none.
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
    if view.stuck:  # Stages without capacity are alike: those who wait spread over them.
        fewest = min(view.there[stage] for stage in best)
        best = [stage for stage in best if view.there[stage] == fewest]
    return chance.choice(best)


def as_suited(
    capacities: Sequence[float], brings: Sequence[float], usual: Sequence[float]
) -> list[float]:
    """The stages' capacities as they look to a peer that would bring so much to each, where peers bring
    `usual`: less where it suits better. So good lines go to the middle, and the others to the ends."""
    return [
        capacity / (own / one) ** SUITED if own > 0 and one > 0 else capacity
        for capacity, own, one in zip(capacities, brings, usual, strict=True)
    ]


def usually(brings: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """What peers would bring to each stage, as their geometric mean: one that lies about itself shifts what
    two stages are to each other by no more than their bytes differ."""
    return tuple(exp(sum(map(log, at)) / len(at)) for at in zip(*brings, strict=True))


def _as_seen(view: View, capacities: Sequence[float], rules: MoveRules, speed: float) -> list[float]:
    """By a peer of that speed, with the line of `rules`, or else a usual one."""
    stages, line = range(len(capacities)), rules.line if rules.line.is_known else view.usual_line
    brings = [view.capacity(rules, stage, speed, line) for stage in stages]
    return as_suited(capacities, brings, view.most_bring or [view.one(rules, stage) for stage in stages])


def _poorest(capacities: Sequence[float], never: frozenset[int]) -> list[int]:
    """Of the stages that a peer can serve."""
    served = {stage: capacity for stage, capacity in enumerate(capacities) if stage not in never}
    least = min(served.values())
    return [stage for stage, capacity in served.items() if capacity <= least * TIE]


def choose_move(
    view: View, me: PeerId, stage: int, rate: float, rules: MoveRules, download_seconds: float,
    chance: Random, passed_over: int = 0, on_disk: frozenset[int] = frozenset(),
) -> Intent | None:  # fmt: skip
    """The move that this peer should announce, from one of the richest stages to one of the poorest; None:
    stay. `rate`: what it does here, microbatches per second; 0: not measured yet. `passed_over`: so many
    richer stages are not waited for. `on_disk`: stages whose weights this peer has. To a stuck stage a peer
    moves only with its weights: another one would wait there, too."""
    if rules.groups > 1 and view.there and view.there[stage] <= rules.groups:
        return None  # Some of the experts here would have nobody.
    others = replace(view, intents=tuple(intent for intent in view.intents if intent.peer != me))
    capacities, _ = carried_out(others, rules, download_seconds)
    closed = rules.never | (view.stuck - on_disk)
    restored = [place for place in sorted(on_disk - rules.never) if capacities[place] <= 0]
    poorest = min((value for place, value in enumerate(capacities) if place not in closed), default=1.0)
    speed = rate * rules.work[stage]
    if rate <= 0:
        if poorest > 0:
            return None  # It will have measured soon.
        speed = view.usual  # While a stage has nobody, nobody measures anything.
    if view.usual > 0:
        speed = min(speed, FASTEST * view.usual)  # As it is counted.
    leaves = view.capacity(rules, stage, speed, rules.line)
    poor = restored or _poorest(_as_seen(view, capacities, rules, speed), closed)
    target = chance.choice(poor)
    one = view.one(rules, target)

    def goes_first(other: int) -> bool:
        """A stage so much richer that it would be this stage's turn only after it, and that a usual peer of
        it would leave."""
        usual = Intent(me, other, target, view.one(rules, other), one)
        richer = capacities[other] > capacities[stage] + leaves
        return richer and worthwhile(capacities, usual, rules, download_seconds, one)

    if poorest > 0 and sum(map(goes_first, range(len(capacities)))) > passed_over:
        return None  # Whoever is at the richest stage goes first, or peers would move twice.
    intent = Intent(me, stage, target, leaves, view.capacity(rules, target, speed, rules.line))
    if target == stage or not worthwhile(capacities, intent, rules, download_seconds, one):
        return None
    return intent


def period_seconds(peers: int) -> float:
    """How often a peer of a swarm of so many looks."""
    return min(LONGEST_PERIOD_SECONDS, max(SHORTEST_PERIOD_SECONDS, PERIOD_SECONDS_PER_PEER * peers))


def move_rules(manifest: Manifest, never: frozenset[int] = frozenset(), line: Line = UNKNOWN) -> MoveRules:
    """Those of a run, for a peer with that line that cannot serve the stages in `never`."""
    return MoveRules(
        stage_work(manifest), never=never, paths=manifest.path_rules(), crossings=crossings(manifest),
        gossip=gossip_per_peer(manifest), line=line, groups=manifest.model.experts.groups,
        snapshot_rounds=manifest.rounds.snapshot_rounds,
    )  # fmt: skip


def stage_work(manifest: Manifest) -> tuple[float, ...]:
    """Multiplications per token and stage, in those of a layer: the weights of its matrices, and attention to
    half of the sequence. Looking up embeddings costs nothing."""
    model = manifest.model
    heads = model.heads * model.head_width
    projections = model.width * (2 * heads + 2 * model.key_value_heads * model.head_width)
    attention = manifest.data.sequence_tokens * heads
    feeds = 3 * model.width * model.active_feed_forward
    layer = projections + attention + feeds
    work = [float(layers) for layers in manifest.stages]
    work[-1] += model.width * model.vocabulary / layer
    return tuple(work)
