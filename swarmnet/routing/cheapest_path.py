"""Find the cheapest path that the rules allow for a microbatch, from what a peer knows about its neighbours.

    back = hop there + wait for memory and processor + compute + the rest of the path + hop back

The wait follows from the bookings that the neighbour reported (`capacity.py`). The rest comes from the
neighbour's table of costs. For each frontier and number of stages left to visit, the table gives the seconds
of the cheapest round trip from there without waiting. A peer computes its own table from its neighbours'
tables and its own hops alone (distance vector routing, Bellman-Ford).

The frontier is the highest stage that the microbatch has visited. A swap is a visit to a skipped stage below
the frontier (run/path_rules.py).

Swaps can deadlock: two microbatches that hold memory in stages 1 and 2 can each wait for the stage of the
other. Therefore no microbatch waits for a stage below its frontier. A swap goes only to a peer that has room
at once and keeps it. No path is chosen that only a swap could complete. Every wait is then for a higher stage
than any stage that the microbatch holds. The highest stage waits for none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarmnet.identifiers import PeerId
from swarmnet.routing.capacity import Load, earliest_start
from swarmnet.run.path_rules import PathHeader, PathRules, choices, needs_swap, shorten, visit

ToGo = Mapping[tuple[int, int], float]
"""Maps (frontier, stages left to visit) to seconds from the end of the forward pass here to the gradient."""
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

    @property
    def swaps(self) -> bool:
        """Return whether this choice is a swap: it visits a stage below the frontier."""
        return self.header.visited[-1] < self.header.frontier


def costs_to_go(
    stage: int, rules: PathRules, neighbours: Iterable[Neighbour]
) -> dict[tuple[int, int], float]:
    """Return the cost table of a peer of `stage`, computed from the tables of its neighbours. It maps
    (frontier, stages left to visit) to the seconds of the cheapest way from here to the last stage and back,
    without waiting. A pair for which no path is known is missing. Only steps to stages above the frontier
    count, never swaps."""
    table: dict[tuple[int, int], float] = {}
    known = list(neighbours)
    for frontier in range(stage, min(stage + 2, rules.last)):  # The frontier is one stage ahead after a swap.
        for hops in range(1, rules.stages):
            # This header stands for those of all microbatches with this frontier and as many hops left.
            header = PathHeader(visited=(0, stage), frontier=frontier, swaps_left=0, hops_left=hops)
            least_seconds = NEVER
            for other in known:
                if other.stage > frontier and other.stage in choices(header, rules):
                    rest = _seconds_after(other, visit(header, other.stage, rules), rules)
                    seconds = 2 * other.hop_seconds + other.load.compute_seconds + rest
                    least_seconds = min(least_seconds, seconds)
            if least_seconds < NEVER:
                table[frontier, hops] = least_seconds
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
    `avoid` are never chosen, nor are paths that only a swap could complete."""
    headers = {stage: visit(header, stage, rules) for stage in choices(header, rules)}
    headers = {stage: there for stage, there in headers.items() if not needs_swap(there, rules)}
    best: PathChoice | None = None
    for other in neighbours:
        header_there = headers.get(other.stage)
        if header_there is None or other.peer in avoid:
            continue
        if other.stage < header.frontier and not other.load.has_room:  # A swap never waits.
            continue
        rest = _seconds_after(other, header_there, rules)
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
            best = PathChoice(other.peer, header_there, arrival, start, release=start + seconds, back=back)
    return best


def _seconds_after(other: Neighbour, header: PathHeader, rules: PathRules) -> float:
    """Return the seconds from the end of the forward pass on `other` until the gradient is back there.
    `header` is the microbatch's header there. Returns 0 on the last stage, and `NEVER` if `other` reported no
    such path."""
    if other.stage == rules.last:
        return 0.0
    return other.to_go.get((header.frontier, header.hops_left), NEVER)


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
    has no stages. Its `missing` then lists all unvisited stages without a live peer."""
    planned: PathHeader | None = header
    while planned is not None:
        cache: dict[_PathState, bool] = {}
        stages = tuple(s for s in choices(planned, rules) if _can_complete(planned, s, rules, live, cache))
        if stages:
            return NextStages(planned, stages)
        planned = shorten(planned, rules)
    dead = [s for s in range(1, rules.stages) if s not in live and s not in header.visited]
    return NextStages(header, (), tuple(dead))


_PathState = tuple[int, bool, int, int]
"""All that decides how a path may continue: the frontier, whether the stage just below it was visited, the
number of swaps left, and the number of stages left to visit."""


def _can_complete(
    header: PathHeader, stage: int, rules: PathRules, live: Collection[int], cache: dict[_PathState, bool]
) -> bool:
    """Return whether a microbatch that visits `stage` next can still reach the last stage through `live`
    stages. `cache` holds the results of this recursion, by all that decides how a path may continue."""
    if stage not in live:
        return False
    after = visit(header, stage, rules)
    is_below_visited = after.frontier - 1 in after.visited  # The only stage to which a swap could go.
    path_state = (after.frontier, is_below_visited, after.swaps_left, after.hops_left)
    if path_state not in cache:
        following = choices(after, rules)
        is_complete = not following  # Only on the last stage no stage may follow.
        cache[path_state] = is_complete or any(_can_complete(after, s, rules, live, cache) for s in following)
    return cache[path_state]
