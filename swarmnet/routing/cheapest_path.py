"""Find the cheapest path that the rules allow for a microbatch, from what a peer knows about its neighbours.

    back = hop there + wait for memory and processor + compute + the rest of the path + hop back

The wait follows from the bookings that the neighbour reported (`capacity.py`). The rest comes from the
neighbour's table of costs. The table gives the seconds of the cheapest round trip from there without waiting,
for each frontier and number of stages left to visit. A peer computes its own table from its neighbours'
tables and its own hops alone (distance vector routing, Bellman-Ford).

The frontier is the highest stage that the microbatch has visited. A swap is a visit to a skipped stage below
the frontier (run/path_rules.py).

Swaps can deadlock: two microbatches that hold memory in stages 1 and 2 can each wait for the stage of the
other. Therefore no microbatch waits for a stage below its frontier. A swap goes only to a peer that has room
at once and keeps it. No path is chosen that only a swap could complete. Every wait is then for a higher stage
than any stage that the microbatch holds, and the highest stage waits for none.
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
    """Compute the cost table of a peer of `stage` from the tables of its neighbours. The table contains only
    ways to higher stages. A swap is a bonus that no estimate counts on."""
    table: dict[tuple[int, int], float] = {}
    known = list(neighbours)
    for frontier in range(stage, min(stage + 2, rules.last)):  # The frontier is one stage ahead after a swap.
        for hops in range(1, rules.stages):
            header = PathHeader((0, stage), frontier, 0, hops)
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
    header: PathHeader,
    rules: PathRules,
    neighbours: Iterable[Neighbour],
    ready: float,
    now: float,
    avoid: Collection[PeerId] = (),
) -> PathChoice | None:
    """Choose the next peer of a microbatch whose forward pass here ends at `ready`. Returns None if no peer
    can take the microbatch. Peers in `avoid` are never chosen."""
    legal = {
        stage: after
        for stage in choices(header, rules)
        for after in (visit(header, stage, rules),)
        if not needs_swap(after, rules)
    }
    found: PathChoice | None = None
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
            # The lower bound without a wait is already too late; the exact start is slow to compute.
            continue
        start = earliest_start(other.load, arrival, seconds, now)
        back = start + seconds + other.hop_seconds
        if found is None or back < found.back:
            found = PathChoice(other.peer, after, arrival, start, start + seconds, back)
    return found


def _rest(other: Neighbour, after: PathHeader, rules: PathRules) -> float:
    """Return the seconds for the path after `other` until the gradient is back there; `NEVER` if `other`
    reported none."""
    return 0.0 if other.stage == rules.last else other.to_go.get((after.frontier, after.hops_left), NEVER)


@dataclass(frozen=True, slots=True)
class Onward:
    """The next stages that a microbatch may visit when only some stages have live peers."""

    header: PathHeader
    """The original header, or one with fewer stages left to visit if dead stages had to be skipped."""
    stages: tuple[int, ...]
    """Stages from which the path can be completed. Empty if the microbatch has to wait."""
    missing: tuple[int, ...] = ()
    """Stages without a live peer that the path cannot be completed without."""


def onward(header: PathHeader, rules: PathRules, live: Collection[int]) -> Onward:
    """Return the stages in `live` that a microbatch may visit next. The header is shortened (more stages are
    skipped) only if the path cannot be completed otherwise."""
    shorter: PathHeader | None = header
    while shorter is not None:
        results: dict[_PathState, bool] = {}
        stages = tuple(s for s in choices(shorter, rules) if _leads_on(shorter, s, rules, live, results))
        if stages:
            return Onward(shorter, stages)
        shorter = shorten(shorter, rules)
    dead = [s for s in range(1, rules.stages) if s not in live and s not in header.visited]
    return Onward(header, (), tuple(dead))


_PathState = tuple[int, bool, int, int]
"""All that decides how a path may continue: the frontier, whether the stage just below it was visited, the
number of swaps left, and the number of stages left to visit."""


def _leads_on(
    header: PathHeader, stage: int, rules: PathRules, live: Collection[int], results: dict[_PathState, bool]
) -> bool:
    """Return whether a microbatch that visits `stage` next can still reach the last stage through `live`
    stages. `results` caches the answers of this recursion."""
    if stage not in live:
        return False
    after = visit(header, stage, rules)
    path_state = (after.frontier, after.frontier - 1 in after.visited, after.swaps_left, after.hops_left)
    if path_state not in results:
        onwards = choices(after, rules)  # Empty on the last stage: the path is complete.
        results[path_state] = not onwards or any(_leads_on(after, s, rules, live, results) for s in onwards)
    return results[path_state]
