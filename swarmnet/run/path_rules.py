"""Rules for the path of a microbatch through the stages, if some may be skipped or swapped.

SkipPipe (arXiv:2502.19913) trains with microbatches that visit only some stages. They avoid slow peers, and a
dead stage costs quality instead of stopping the run. It has these convergence constraints:

- The first and the last stage are on every path, at its ends, and no stage is on it twice.
- A path has at least `PathRules.shortest` stages.
- A stage below the frontier (the highest stage visited) may be visited late. This *swap* reaches back by one
  stage at most, and a path has a bounded number of swaps.
- No path continues more than `LONGEST_JUMP` stages beyond the frontier.

A `PathHeader` travels with the microbatch and says what was visited and how much remains. `check` recomputes
it from the visited stages alone, so any peer can detect an illegal header without a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Self

LONGEST_JUMP = 4
"""Maximum number of stages from the frontier to the next: the reference's limit for its 6 stages."""
LONGEST_SWAP = 1
"""Maximum number of stages that a swap reaches back: the reference allows no more."""


class IllegalPath(ValueError):
    """A path breaks the run's rules; the message says which and where."""


@dataclass(frozen=True, slots=True)
class PathRules:
    """The paths that the manifest allows."""

    stages: int
    """Number of stages of the whole model; stages are 0 .. stages - 1."""
    most_skipped: int = 0
    """Maximum number of stages that a microbatch may skip."""
    most_swaps: int = 0
    full_path_warmup_rounds: int = 0
    """Number of rounds of the first stage, from the run's start, in which microbatches skip nothing."""
    full_path_fraction: float = 0.0
    """Share of the later microbatches that skip nothing either."""

    @classmethod
    def of(
        cls,
        stages: int,
        skip_ratio: float,
        swaps: int,
        full_path_warmup_rounds: int = 0,
        full_path_fraction: float = 0.0,
    ) -> Self:
        """Return the rules for these keys of a manifest. The share `skip_ratio` of all stages may be skipped,
        rounded down (1/3 of 6 are 2), but never the first and the last stage."""
        by_ratio = int(skip_ratio * stages + 1e-9)  # The float 1/3 is a little less than a third.
        most_skipped = max(0, min(by_ratio, stages - 2))
        return cls(stages, most_skipped, swaps, full_path_warmup_rounds, full_path_fraction)

    @property
    def last(self) -> int:
        return self.stages - 1

    @property
    def shortest(self) -> int:
        """Number of stages on the shortest legal path."""
        jumps = -(-self.last // LONGEST_JUMP)  # From the first stage to the last, with longest jumps.
        return max(self.stages - self.most_skipped, 1 + jumps)

    def length(self, round: int, begun: int) -> int:
        """Return how many stages the next microbatch visits. It starts in this round, after `begun` others.
        In the warm-up rounds every microbatch visits all stages. Later only `full_path_fraction` of them do,
        evenly spaced, and the others take shortest paths. A run that first trains full paths learns better
        (progressive layer dropping, arXiv:2010.13369; docs/decisions/0016-whole-first.md)."""
        # The next path is full if (begun + 1) * full_path_fraction reaches a new integer.
        full_paths_before = int(begun * self.full_path_fraction)
        is_next_full = int((begun + 1) * self.full_path_fraction) > full_paths_before
        is_warmup = round < self.full_path_warmup_rounds
        return self.stages if is_warmup or is_next_full else self.shortest

    def mean_length(self, round: int) -> float:
        """Return the mean length of the paths that start in this round of the first stage."""
        share = 1.0 if round < self.full_path_warmup_rounds else self.full_path_fraction
        return share * self.stages + (1.0 - share) * self.shortest

    def visit_share(self, stage: int, round: int) -> float:
        """Return the share of the microbatches started in this round that visit `stage`: 1 for the first and
        the last stage. The middle stages are assumed to be visited equally often."""
        is_middle = 0 < stage < self.last
        return (self.mean_length(round) - 2) / (self.stages - 2) if is_middle else 1.0

    def branch_scale(self, stage: int, visited: int) -> float:
        """Return the factor, at most 1, on what the layers of a stage add to the hidden states. It holds for
        paths of `visited` stages, in training and in use.

        It is 1 for the first and the last stage. Most microbatches of training take shortest paths, which
        have `shortest` - 2 middle stages. On a longer path each middle stage counts less: their number times
        the factor stays constant. Stochastic depth does this at test time (arXiv:1603.09382, equation 5).
        """
        is_middle = 0 < stage < self.last and visited > 2
        return min(1.0, (self.shortest - 2) / (visited - 2)) if is_middle else 1.0

    @property
    def skips(self) -> bool:
        return self.shortest < self.stages or self.most_swaps > 0

    @property
    def trains_no_middle(self) -> bool:
        """Whether the shortest paths, which most training uses, skip all stages that may be skipped."""
        return self.shortest == 2 < self.stages

    @property
    def reach(self) -> int:
        """Maximum distance, in stages, between two successive stages of a path. A peer must know peers this
        many stages ahead and behind."""
        without_swap = min(LONGEST_JUMP, self.most_skipped + 1)  # It passes all stages that are skipped.
        if not self.most_swaps:
            return without_swap
        # A step may also pass one stage to which a later swap returns.
        before_swap = min(LONGEST_JUMP, self.most_skipped + 2)
        # The step after a swap starts `LONGEST_SWAP` below the frontier. Another swap may follow it.
        beyond_frontier = before_swap if self.most_swaps > 1 else without_swap
        return max(before_swap, LONGEST_SWAP + beyond_frontier)


@dataclass(frozen=True, slots=True)
class PathHeader:
    """The progress of a microbatch. All fields but `hops_left` follow from `visited`. For example, a path
    0, 2, 1 has frontier 2 and one swap less left."""

    visited: tuple[int, ...]
    """Stages in the order of visit, including the one that reads this header."""
    frontier: int
    """The highest visited stage."""
    swaps_left: int
    hops_left: int
    """Number of stages still to visit, including the last one; 0 on the last stage."""

    @property
    def length(self) -> int:
        """Number of stages on the whole path as planned."""
        return len(self.visited) + self.hops_left


def count_continuations(header: PathHeader, rules: PathRules) -> int:
    """Return in how many ways the path can be completed. This is the number of choices of the stages to visit
    between the frontier and the last stage. Swaps and the limit on jumps are ignored."""
    stages_between = max(0, rules.last - 1 - header.frontier)
    visits_between = max(0, header.hops_left - 1)  # The last hop goes to the last stage.
    return comb(stages_between, visits_between)


def begin(rules: PathRules, length: int | None = None) -> PathHeader:
    """Return the header on stage 0 of a path of `length` stages (None: the shortest). Raises IllegalPath."""
    length = rules.shortest if length is None else length
    if not rules.shortest <= length <= rules.stages:
        raise IllegalPath(f"a path of {length} stages; this run has {rules.shortest} to {rules.stages}")
    return PathHeader(visited=(0,), frontier=0, swaps_left=rules.most_swaps, hops_left=length - 1)


def straight(rules: PathRules, stage: int) -> PathHeader:
    """Return the header on `stage` of a path that skips nothing."""
    return PathHeader(tuple(range(stage + 1)), stage, rules.most_swaps, rules.last - stage)


def visit(header: PathHeader, stage: int, rules: PathRules) -> PathHeader:
    """Return the header after a visit to `stage` as the next stage. Raises IllegalPath if it is forbidden."""
    violation = _find_violation(header, stage, rules)
    if violation is not None:
        raise IllegalPath(f"stage {stage} after {list(header.visited)}: {violation}")
    return _header_after(header, stage)


def choices(header: PathHeader, rules: PathRules) -> tuple[int, ...]:
    """Return the stages that may be visited next, ascending; empty on the last stage only."""
    lowest = max(1, header.frontier - LONGEST_SWAP)
    highest = min(rules.last, header.frontier + LONGEST_JUMP)
    return tuple(s for s in range(lowest, highest + 1) if _find_violation(header, s, rules) is None)


def shorten(header: PathHeader, rules: PathRules) -> PathHeader | None:
    """Return the header with one stage less to visit; None if the shorter path would not be legal."""
    if header.length <= rules.shortest:
        return None
    shorter = PathHeader(header.visited, header.frontier, header.swaps_left, header.hops_left - 1)
    is_legal = shorter.hops_left > 0 and _is_completable(shorter, rules)  # The last stage must be left.
    return shorter if is_legal else None


def needs_swap(header: PathHeader, rules: PathRules) -> bool:
    """Return whether only a swap to a stage below the frontier can complete the path."""
    stages_between = max(0, rules.last - 1 - header.frontier)  # Between the frontier and the last stage.
    return header.hops_left - 1 > stages_between


def check(header: PathHeader, stage: int, rules: PathRules) -> None:
    """Raise IllegalPath unless honest peers could have sent this header to a peer of `stage`. The path is
    walked again from the first stage, so no field of the header is trusted."""
    visited = header.visited
    if not visited or visited[0] != 0 or visited[-1] != stage or len(visited) > rules.stages:
        raise IllegalPath(f"visited {list(visited)[:8]} is no path from stage 0 to stage {stage}")
    length = header.length
    if header.hops_left < 0 or not rules.shortest <= length <= rules.stages:
        raise IllegalPath(f"a path of {length} stages; this run has {rules.shortest} to {rules.stages}")
    walked = PathHeader(visited=(0,), frontier=0, swaps_left=rules.most_swaps, hops_left=length - 1)
    for following in visited[1:]:
        walked = visit(walked, following, rules)
    if walked != header:
        raise IllegalPath(
            f"after {list(visited)} the frontier is {walked.frontier} and {walked.swaps_left} swaps are "
            f"left, not {header.frontier} and {header.swaps_left}"
        )


def _find_violation(header: PathHeader, stage: int, rules: PathRules) -> str | None:
    """Return the reason why `stage` may not be next; None if it may."""
    if stage in header.visited:
        return "it was visited before"
    if not 0 < stage <= rules.last:
        return f"stages after the first are 1 to {rules.last}"
    is_last_hop = header.hops_left == 1
    if (stage == rules.last) != is_last_hop:
        return f"{header.hops_left} stages are left to visit, and the last one ends a path"
    distance = stage - header.frontier
    if distance > LONGEST_JUMP:
        return f"more than {LONGEST_JUMP} stages beyond the frontier"
    if distance < 0 and (-distance > LONGEST_SWAP or header.swaps_left < 1):
        return f"{-distance} stages below the frontier with {header.swaps_left} swaps left"
    if not _is_completable(_header_after(header, stage), rules):
        return "the path could not be completed from there"
    return None


def _header_after(header: PathHeader, stage: int) -> PathHeader:
    """Return the header after a visit to `stage`, without a check of the rules."""
    is_swap = stage < header.frontier
    return PathHeader(
        visited=(*header.visited, stage),
        frontier=max(header.frontier, stage),
        swaps_left=header.swaps_left - 1 if is_swap else header.swaps_left,
        hops_left=header.hops_left - 1,
    )


def _is_completable(header: PathHeader, rules: PathRules) -> bool:
    """Return whether the path can end at the last stage after exactly `hops_left` more visits.

    It can have at most one visit to each stage ahead, and one more by a swap to the stage just below the
    frontier. It needs at least as many visits as jumps of maximum length lead to the last stage. Any number
    of visits between these two works."""
    stages_ahead = rules.last - header.frontier  # Includes the last stage.
    if stages_ahead == 0:
        return header.hops_left == 0
    below = header.frontier - 1
    can_swap = header.swaps_left > 0 and below > 0 and below not in header.visited
    most_visits = stages_ahead + int(can_swap)
    return 1 <= header.hops_left <= most_visits and stages_ahead <= LONGEST_JUMP * header.hops_left
