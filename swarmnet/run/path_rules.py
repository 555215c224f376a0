"""Which ways through the stages are legal when some may be left out or taken in another order.

SkipPipe (arXiv:2502.19913) trains with microbatches that visit only some stages, so that slow places are
gone around and a dead stage costs quality instead of the run. Its convergence constraints:

- the first and the last stage are on every path, at its ends; no stage is on it twice;
- a path has at least `Rules.shortest` stages;
- a stage below the frontier (the highest stage visited) may be visited late: a *swap*. It reaches back by
  one stage at most, and a path has a bounded number of swaps;
- nobody goes on more than `LONGEST_JUMP` stages beyond the frontier.

What was done, and what is still to do, travels in a `Header` with the microbatch. `check` recomputes it from
the stages visited alone, so any peer can tell an illegal one without asking anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Self

LONGEST_JUMP = 4
"""Stages from the frontier to the next: the reference's limit for its 6 stages (its path search)."""
LONGEST_SWAP = 1
"""Stages that a swap reaches back: the reference allows no more."""


class IllegalPath(ValueError):
    """A path breaks the run's rules; the message says which and where."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the manifest allows."""

    stages: int
    """Of the whole model; stages are 0 .. stages - 1."""
    most_skipped: int = 0
    """Stages a microbatch may leave out."""
    most_swaps: int = 0
    whole_rounds: int = 0
    """Rounds of the first stage, from the run's beginning, in which microbatches leave nothing out."""
    whole_share: float = 0.0
    """Of the microbatches after them, those that leave nothing out either."""

    @classmethod
    def of(
        cls, stages: int, skip_ratio: float, swaps: int, whole_rounds: int = 0, whole_share: float = 0.0
    ) -> Self:
        """`skip_ratio` of all stages, rounded down (1/3 of 6 are 2), but never the first or the last."""
        skipped = int(skip_ratio * stages + 1e-9)  # 1/3 is a little less than a third
        return cls(stages, max(0, min(skipped, stages - 2)), swaps, whole_rounds, whole_share)

    @property
    def last(self) -> int:
        return self.stages - 1

    @property
    def shortest(self) -> int:
        """Stages on the shortest legal path."""
        longest_jumps = -(-self.last // LONGEST_JUMP) + 1
        return max(self.stages - self.most_skipped, longest_jumps)

    def length(self, round: int, begun: int) -> int:
        """Stages to visit for a microbatch that starts in this round of the first stage, where `begun` others
        have started before. A run that begins whole and skips afterwards learns better than one that skips
        from the start (progressive layer dropping, arXiv:2010.13369; docs/decisions/0016-whole-first.md)."""
        its_turn = int((begun + 1) * self.whole_share) > int(begun * self.whole_share)
        return self.stages if round < self.whole_rounds or its_turn else self.shortest

    def mean_length(self, round: int) -> float:
        """Of the microbatches that start in this round of the first stage."""
        share = 1.0 if round < self.whole_rounds else self.whole_share
        return share * self.stages + (1.0 - share) * self.shortest

    def visit_share(self, stage: int, round: int) -> float:
        """Of the microbatches that start in this round of the first stage, how many visit `stage`, if all
        between the first and the last stage are visited alike."""
        middle = 0 < stage < self.last
        return (self.mean_length(round) - 2) / (self.stages - 2) if middle else 1.0

    def branch_scale(self, stage: int, visited: int) -> float:
        """What the layers of a stage count for on a path of so many stages, at most 1; for the first and the
        last stage always 1. The same in training and in use.

        Most microbatches of training take shortest paths, so a middle stage learns beside `shortest` - 3
        others. Where more of them add to the same hidden states, each counts less, so that their number times
        what each counts stays the same: stochastic depth's rule for its test time (arXiv:1603.09382,
        equation 5).
        """
        middle = 0 < stage < self.last and visited > 2
        return min(1.0, (self.shortest - 2) / (visited - 2)) if middle else 1.0

    @property
    def skips(self) -> bool:
        return self.shortest < self.stages or self.most_swaps > 0

    @property
    def trains_no_middle(self) -> bool:
        """Whether shortest paths, which are those of training, leave out all stages that may be left out."""
        return self.shortest == 2 < self.stages

    @property
    def reach(self) -> int:
        """Stages between neighbours on a path: a peer must know those so far ahead and behind."""
        ahead = min(LONGEST_JUMP, self.most_skipped + 1 + (self.most_swaps > 0))
        if not self.most_swaps:
            return ahead
        return max(ahead, LONGEST_SWAP + min(LONGEST_JUMP, self.most_skipped + 1 + (self.most_swaps > 1)))


@dataclass(frozen=True, slots=True)
class Header:
    """How far a microbatch has come. All fields but `hops_left` follow from `visited`."""

    visited: tuple[int, ...]
    """Stages in the order of visit, the one that reads this header included."""
    frontier: int
    """The highest of them."""
    swaps_left: int
    hops_left: int
    """Stages still to visit, the last one included: 0 on the last stage."""

    @property
    def length(self) -> int:
        """Stages on the whole path, if it goes on as it is meant to."""
        return len(self.visited) + self.hops_left


def ways_on(header: Header, rules: Rules) -> int:
    """How many ways ahead there are from here, where no jump is too long for them."""
    between = max(0, rules.last - 1 - header.frontier)
    return comb(between, max(0, header.hops_left - 1))


def begin(rules: Rules, length: int | None = None) -> Header:
    """The header on the first stage of a path of `length` stages (None: the shortest that is allowed)."""
    length = rules.shortest if length is None else length
    if not rules.shortest <= length <= rules.stages:
        raise IllegalPath(f"a path of {length} stages; this run has {rules.shortest} to {rules.stages}")
    return Header((0,), 0, rules.most_swaps, length - 1)


def straight(rules: Rules, stage: int) -> Header:
    """The header on `stage` of a path that leaves nothing out."""
    return Header(tuple(range(stage + 1)), stage, rules.most_swaps, rules.last - stage)


def visit(header: Header, stage: int, rules: Rules) -> Header:
    """The header for `stage` as the next one. Raises IllegalPath."""
    trouble = _trouble(header, stage, rules)
    if trouble is not None:
        raise IllegalPath(f"stage {stage} after {list(header.visited)}: {trouble}")
    return _after(header, stage)


def choices(header: Header, rules: Rules) -> tuple[int, ...]:
    """The stages that may be visited next, ascending. Empty on the last stage only."""
    lowest = max(1, header.frontier - LONGEST_SWAP)
    highest = min(rules.last, header.frontier + LONGEST_JUMP)
    return tuple(s for s in range(lowest, highest + 1) if _trouble(header, s, rules) is None)


def shorten(header: Header, rules: Rules) -> Header | None:
    """The same with one stage less to visit; None where the budget of skips is used up."""
    if header.length <= rules.shortest:
        return None
    shorter = Header(header.visited, header.frontier, header.swaps_left, header.hops_left - 1)
    return shorter if shorter.hops_left > 0 and _completable(shorter, rules) else None


def needs_swap(header: Header, rules: Rules) -> bool:
    """Whether the path can only be completed by going back to a stage below the frontier."""
    return header.hops_left - 1 > max(0, rules.last - 1 - header.frontier)


def check(header: Header, stage: int, rules: Rules) -> None:
    """Raise IllegalPath unless honest peers could have sent this header to a peer of `stage`.

    The path is walked again from the first stage; nothing in the header is believed.
    """
    visited = header.visited
    if not visited or visited[0] != 0 or visited[-1] != stage or len(visited) > rules.stages:
        raise IllegalPath(f"visited {list(visited)[:8]} is no path from stage 0 to stage {stage}")
    length = header.length
    if header.hops_left < 0 or not rules.shortest <= length <= rules.stages:
        raise IllegalPath(f"a path of {length} stages; this run has {rules.shortest} to {rules.stages}")
    walked = Header((0,), 0, rules.most_swaps, length - 1)
    for following in visited[1:]:
        walked = visit(walked, following, rules)
    if walked != header:
        raise IllegalPath(
            f"after {list(visited)} the frontier is {walked.frontier} and {walked.swaps_left} swaps are "
            f"left, not {header.frontier} and {header.swaps_left}"
        )


def _trouble(header: Header, stage: int, rules: Rules) -> str | None:
    """Why `stage` may not be next."""
    if stage in header.visited:
        return "it was visited before"
    if not 0 < stage <= rules.last:
        return f"stages after the first are 1 to {rules.last}"
    if (stage == rules.last) != (header.hops_left == 1):
        return f"{header.hops_left} stages are left to visit, and the last one ends a path"
    distance = stage - header.frontier
    if distance > LONGEST_JUMP:
        return f"more than {LONGEST_JUMP} stages beyond the frontier"
    if distance < 0 and (-distance > LONGEST_SWAP or header.swaps_left < 1):
        return f"{-distance} stages below the frontier with {header.swaps_left} swaps left"
    if not _completable(_after(header, stage), rules):
        return "the path could not be completed from there"
    return None


def _after(header: Header, stage: int) -> Header:
    return Header(
        (*header.visited, stage),
        max(header.frontier, stage),
        header.swaps_left - (stage < header.frontier),
        header.hops_left - 1,
    )


def _completable(header: Header, rules: Rules) -> bool:
    """Whether the stages left can be found: all those ahead, and one behind if it may be swapped in.

    Going ahead never costs a stage that could be visited, so counting is enough; jumps bound it from below.
    """
    ahead = rules.last - header.frontier  # the last stage included
    if ahead == 0:
        return header.hops_left == 0
    behind = header.frontier - 1
    swappable = header.swaps_left > 0 and behind > 0 and behind not in header.visited
    return 1 <= header.hops_left <= ahead + swappable and ahead <= LONGEST_JUMP * header.hops_left
