"""The cheapest legal way on for a microbatch, with what a peer knows of its neighbours.

    back = hop there + wait for memory and processor + compute + the rest of the path + hop back

where the wait comes from the bookings that the neighbour told (capacity.py), and the rest from its table of
costs to go: for a frontier and a number of stages left, the cheapest round trip from there without waiting.
A table follows from the neighbours' tables and the own hops alone (distance vector, Bellman-Ford).

Swaps can deadlock: two microbatches that hold memory in stages 1 and 2 and wait for each other's. So nobody
waits for a stage below its frontier. A swap goes only to a peer that has room at once and keeps it, and no
way is taken that could be completed by a swap alone: then whoever waits, waits for a higher stage than any it
holds, and the highest waits for nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarmnet.identifiers import PeerId
from swarmnet.routing.capacity import Load, earliest_start
from swarmnet.run.path_rules import Header, Rules, choices, needs_swap, shorten, visit

ToGo = Mapping[tuple[int, int], float]
"""(frontier, stages left to visit) -> seconds from the end of the own forward until the gradient is back."""
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What a peer knows of another."""

    peer: PeerId
    stage: int
    hop_seconds: float
    """A microbatch's hidden states to it, or its gradient back."""
    load: Load
    to_go: ToGo = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    peer: PeerId
    header: Header
    """For that peer."""
    arrival: float
    start: float
    """Its forward is expected to begin then ..."""
    release: float
    """... its backward to end, ..."""
    back: float
    """... and the gradient to be here."""

    @property
    def swaps(self) -> bool:
        return self.header.visited[-1] < self.header.frontier


def costs_to_go(stage: int, rules: Rules, neighbours: Iterable[Neighbour]) -> dict[tuple[int, int], float]:
    """The table of a peer of `stage`, by those of its neighbours. Ways ahead only: swaps are windfalls."""
    table: dict[tuple[int, int], float] = {}
    known = list(neighbours)
    for frontier in range(stage, min(stage + 2, rules.last)):  # one more after a swap
        for hops in range(1, rules.stages):
            header = Header((0, stage), frontier, 0, hops)
            ways = [
                2 * other.hop_seconds + other.load.compute_seconds + rest
                for other in known
                if other.stage > frontier and other.stage in choices(header, rules)
                for rest in (_rest(other, visit(header, other.stage, rules), rules),)
            ]
            if ways and min(ways) < NEVER:
                table[frontier, hops] = min(ways)
    return table


def cheapest(
    header: Header,
    rules: Rules,
    neighbours: Iterable[Neighbour],
    ready: float,
    now: float,
    avoid: Collection[PeerId] = (),
) -> Choice | None:
    """Where a microbatch goes whose forward here is done at `ready`; None where nobody can take it."""
    legal = {
        stage: after
        for stage in choices(header, rules)
        for after in (visit(header, stage, rules),)
        if not needs_swap(after, rules)
    }
    found: Choice | None = None
    for other in neighbours:
        after = legal.get(other.stage)
        if after is None or other.peer in avoid:
            continue
        if other.stage < header.frontier and not other.load.has_room:
            continue
        rest = _rest(other, after, rules)
        if rest == NEVER:
            continue
        arrival = ready + other.hop_seconds
        seconds = other.load.compute_seconds + rest
        if found is not None and arrival + seconds + other.hop_seconds >= found.back:
            continue  # Not even without a wait: to find that out is what costs time.
        start = earliest_start(other.load, arrival, seconds, now)
        back = start + seconds + other.hop_seconds
        if found is None or back < found.back:
            found = Choice(other.peer, after, arrival, start, start + seconds, back)
    return found


def _rest(other: Neighbour, after: Header, rules: Rules) -> float:
    return 0.0 if other.stage == rules.last else other.to_go.get((after.frontier, after.hops_left), NEVER)


@dataclass(frozen=True, slots=True)
class Onward:
    """Where a microbatch may go when only some stages have live peers."""

    header: Header
    """As it was, or with fewer stages left to visit: dead ones are skipped within the budget."""
    stages: tuple[int, ...]
    """From each of them the path can be completed. Empty: wait."""
    missing: tuple[int, ...] = ()
    """Stages of which none has a live peer and without which the path cannot be completed."""


def onward(header: Header, rules: Rules, live: Collection[int]) -> Onward:
    """The legal next stages by the `live` ones. Skips more than was meant to only where that is needed."""
    shorter: Header | None = header
    while shorter is not None:
        known: dict[_Place, bool] = {}
        stages = tuple(s for s in choices(shorter, rules) if _leads_on(shorter, s, rules, live, known))
        if stages:
            return Onward(shorter, stages)
        shorter = shorten(shorter, rules)
    dead = [s for s in range(1, rules.stages) if s not in live and s not in header.visited]
    return Onward(header, (), tuple(dead))


_Place = tuple[int, bool, int, int]
"""All that decides how a path can go on: frontier, whether the stage before it was visited, swaps, hops."""


def _leads_on(
    header: Header, stage: int, rules: Rules, live: Collection[int], known: dict[_Place, bool]
) -> bool:
    if stage not in live:
        return False
    after = visit(header, stage, rules)
    place = (after.frontier, after.frontier - 1 in after.visited, after.swaps_left, after.hops_left)
    if place not in known:
        onwards = choices(after, rules)
        known[place] = not onwards or any(_leads_on(after, s, rules, live, known) for s in onwards)
    return known[place]
