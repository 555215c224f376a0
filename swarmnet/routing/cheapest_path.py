"""Find the cheapest path that the rules allow for a microbatch, from what a peer knows about its neighbours.

    back = hop there + wait for memory and processor + compute + the rest of the path + hop back

The wait follows from the bookings that the neighbour reported (`capacity.py`). The rest comes from the
neighbour's table of costs. For each number of stages left to visit, the table gives the seconds of the
cheapest round trip from there without waiting. A peer computes its own table from its neighbours' tables and
its own hops alone (distance vector routing, Bellman-Ford).

Waits cannot deadlock: every wait is for a higher stage than any that the microbatch holds, and the last stage
waits for none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarmnet.identifiers import PeerId
from swarmnet.routing.capacity import Load, earliest_start
from swarmnet.run.path_rules import PathHeader, PathRules, choices, shorten, visit

ToGo = Mapping[int, float]
"""Maps the number of stages left to visit to the seconds from the end of the forward pass to the gradient."""
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What a peer knows about another peer."""

    peer: PeerId
    stage: int
    hop_seconds: float
    """Seconds that a microbatch's hidden states take to this peer, and that its gradient takes back."""
    load: Load
    to_go: ToGo = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PathChoice:
    """A peer to which a microbatch may go next. All times are in seconds on the caller's clock."""

    peer: PeerId
    header: PathHeader
    """Header to send to that peer."""
    arrival: float
    start: float
    """Expected start of the forward pass there."""
    release: float
    """Expected end of the backward pass there."""
    back: float
    """Expected arrival of the gradient back at the sender."""


def costs_to_go(stage: int, rules: PathRules, neighbours: Iterable[Neighbour]) -> dict[int, float]:
    """Return the cost table of a peer of `stage`, computed from the tables of its neighbours. It maps the
    number of stages left to visit to the seconds of the cheapest way from here to the last stage and back,
    without waiting. A number for which no path is known is missing."""
    table: dict[int, float] = {}
    known = list(neighbours)
    for hops in range(1, rules.stages):
        following = choices(PathHeader(visited=(stage,), hops_left=hops), rules)
        least_seconds = NEVER
        for other in known:
            if other.stage in following:
                rest = _seconds_after(other, hops - 1, rules)
                seconds = 2 * other.hop_seconds + other.load.compute_seconds + rest
                least_seconds = min(least_seconds, seconds)
        if least_seconds < NEVER:
            table[hops] = least_seconds
    return table


def cheapest(
    header: PathHeader,
    rules: PathRules,
    neighbours: Iterable[Neighbour],
    ready: float,
    now: float,
    avoid: Collection[PeerId] = (),
) -> PathChoice | None:
    """Choose the next peer of a microbatch whose forward pass on this peer ends at `ready`: the peer from
    which the gradient is expected back first. Returns None if no neighbour can take the microbatch. Peers in
    `avoid` are never chosen."""
    following = choices(header, rules)
    best: PathChoice | None = None
    for other in neighbours:
        if other.stage not in following or other.peer in avoid:
            continue
        rest = _seconds_after(other, header.hops_left - 1, rules)
        if rest == NEVER:
            continue
        arrival = ready + other.hop_seconds
        seconds = other.load.compute_seconds + rest
        if best is not None and arrival + seconds + other.hop_seconds >= best.back:
            # The lower bound without a wait is already too late; the exact start is slow to compute.
            continue
        start = earliest_start(other.load, arrival, seconds, now)
        back = start + seconds + other.hop_seconds
        if best is None or back < best.back:
            header_there = visit(header, other.stage, rules)
            best = PathChoice(other.peer, header_there, arrival, start, release=start + seconds, back=back)
    return best


def _seconds_after(other: Neighbour, hops_left: int, rules: PathRules) -> float:
    """Return the seconds from the end of the forward pass on `other` until the gradient is back there, with
    `hops_left` stages to visit from there. Returns 0 on the last stage, and `NEVER` if `other` reported no
    such path."""
    return 0.0 if other.stage == rules.last else other.to_go.get(hops_left, NEVER)


@dataclass(frozen=True, slots=True)
class NextStages:
    """The next stages that a microbatch may visit when only some stages have live peers."""

    header: PathHeader
    """The original header, or one with fewer stages left to visit if dead stages had to be skipped."""
    stages: tuple[int, ...]
    """Stages from which the path can be completed. Empty if the microbatch has to wait."""
    missing: tuple[int, ...] = ()
    """Stages without a live peer that the path cannot be completed without."""


def onward(header: PathHeader, rules: PathRules, live: Collection[int]) -> NextStages:
    """Return the stages in `live` that a microbatch may visit next. The header is shortened (more stages are
    skipped) only if the path cannot be completed otherwise. If shortening does not help either, the result
    has no stages. Its `missing` then lists all later stages without a live peer."""
    planned: PathHeader | None = header
    while planned is not None:
        cache: _Cache = {}
        stages = tuple(s for s in choices(planned, rules) if _can_complete(planned, s, rules, live, cache))
        if stages:
            return NextStages(planned, stages)
        planned = shorten(planned, rules)
    dead = [s for s in range(header.stage + 1, rules.stages) if s not in live]
    return NextStages(header, (), tuple(dead))


_Cache = dict[tuple[int, int], bool]
"""Maps (stage, stages left to visit), which decide how a path may continue, to whether it can end."""


def _can_complete(
    header: PathHeader, stage: int, rules: PathRules, live: Collection[int], cache: _Cache
) -> bool:
    """Return whether a microbatch that visits `stage` next can still reach the last stage through `live`
    stages."""
    if stage not in live:
        return False
    after = visit(header, stage, rules)
    state = (stage, after.hops_left)
    if state not in cache:
        following = choices(after, rules)
        is_complete = not following  # Only on the last stage no stage may follow.
        cache[state] = is_complete or any(_can_complete(after, s, rules, live, cache) for s in following)
    return cache[state]
