"""Rules for the path of a microbatch through the stages, if some may be skipped.

SkipPipe (arXiv:2502.19913) trains with microbatches that visit only some stages. They avoid slow peers, and a
dead stage costs quality instead of stopping the run. It has these convergence constraints:

- The first and the last stage are on every path, at its ends, and its stages ascend. SkipPipe lets a path
  also go back, which gains nothing without its schedule (docs/decisions/0007-skipping.md).
- A path has at least `PathRules.shortest` stages.
- No step of a path is longer than `LONGEST_JUMP` stages.

A `PathHeader` travels with the microbatch and says what was visited and how much remains. `check` recomputes
it from the visited stages alone, so any peer can detect an illegal header without a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Self

LONGEST_JUMP = 4
"""Maximum number of stages from one to the next: the reference's limit for its 6 stages."""


class IllegalPath(ValueError):
    """A path breaks the run's rules; the message says which and where."""


@dataclass(frozen=True, slots=True)
class PathRules:
    """The paths that the manifest allows."""

    stages: int
    """Number of stages of the whole model; stages are 0 .. stages - 1."""
    most_skipped: int = 0
    """Maximum number of stages that a microbatch may skip."""
    full_path_warmup_rounds: int = 0
    """Number of rounds of the first stage, from the run's start, in which microbatches skip nothing."""
    full_path_fraction: float = 0.0
    """Share of the later microbatches that skip nothing either."""

    @classmethod
    def of(
        cls,
        stages: int,
        skip_ratio: float,
        full_path_warmup_rounds: int = 0,
        full_path_fraction: float = 0.0,
    ) -> Self:
        """Return the rules for these keys of a manifest. The share `skip_ratio` of all stages may be skipped,
        rounded down (1/3 of 6 are 2), but never the first and the last stage."""
        by_ratio = int(skip_ratio * stages + 1e-9)  # The float 1/3 is a little less than a third.
        most_skipped = max(0, min(by_ratio, stages - 2))
        return cls(stages, most_skipped, full_path_warmup_rounds, full_path_fraction)

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
        return self.shortest < self.stages

    @property
    def trains_no_middle(self) -> bool:
        """Whether the shortest paths, which most training uses, skip all stages that may be skipped."""
        return self.shortest == 2 < self.stages

    @property
    def reach(self) -> int:
        """Maximum distance, in stages, between two successive stages of a path. A peer must know peers this
        many stages ahead and behind."""
        return min(LONGEST_JUMP, self.most_skipped + 1)  # One step may pass all stages that are skipped.


@dataclass(frozen=True, slots=True)
class PathHeader:
    """The progress of a microbatch."""

    visited: tuple[int, ...]
    """Stages in the order of visit, including the one that reads this header."""
    hops_left: int
    """Number of stages still to visit, including the last one; 0 on the last stage."""

    @property
    def stage(self) -> int:
        """The stage that reads this header, the highest one visited."""
        return self.visited[-1]

    @property
    def length(self) -> int:
        """Number of stages on the whole path as planned."""
        return len(self.visited) + self.hops_left


def count_continuations(header: PathHeader, rules: PathRules) -> int:
    """Return in how many ways the path can be completed. This is the number of choices of the stages to visit
    before the last stage. The limit on jumps is ignored."""
    stages_between = max(0, rules.last - 1 - header.stage)
    visits_between = max(0, header.hops_left - 1)  # The last hop goes to the last stage.
    return comb(stages_between, visits_between)


def begin(rules: PathRules, length: int | None = None) -> PathHeader:
    """Return the header on stage 0 of a path of `length` stages (None: the shortest). Raises IllegalPath."""
    length = rules.shortest if length is None else length
    if not rules.shortest <= length <= rules.stages:
        raise IllegalPath(f"a path of {length} stages; this run has {rules.shortest} to {rules.stages}")
    return PathHeader((0,), length - 1)


def straight(rules: PathRules, stage: int) -> PathHeader:
    """Return the header on `stage` of a path that skips nothing."""
    return PathHeader(tuple(range(stage + 1)), rules.last - stage)


def visit(header: PathHeader, stage: int, rules: PathRules) -> PathHeader:
    """Return the header after a visit to `stage` as the next stage. Raises IllegalPath if it is forbidden."""
    legal = choices(header, rules)
    if stage not in legal:
        raise IllegalPath(
            f"stage {stage} after {list(header.visited)} with {header.hops_left} stages left to visit; legal "
            f"are {list(legal)}"
        )
    return PathHeader((*header.visited, stage), header.hops_left - 1)


def choices(header: PathHeader, rules: PathRules) -> range:
    """Return the stages that may be visited next; empty on the last stage only. From each of them, the path
    can end at the last stage after exactly the remaining visits: at most one visit to each stage ahead, and
    at least as many as jumps of maximum length."""
    hops_after = header.hops_left - 1
    lowest = max(header.stage + 1, rules.last - LONGEST_JUMP * hops_after)
    highest = min(header.stage + LONGEST_JUMP, rules.last - hops_after)
    return range(lowest, highest + 1)


def shorten(header: PathHeader, rules: PathRules) -> PathHeader | None:
    """Return the header with one stage less to visit; None if the shorter path would not be legal."""
    shorter = PathHeader(header.visited, header.hops_left - 1)
    return shorter if shorter.length >= rules.shortest and choices(shorter, rules) else None


def check(header: PathHeader, stage: int, rules: PathRules) -> None:
    """Raise IllegalPath unless honest peers could have sent this header to a peer of `stage`. The path is
    walked again from the first stage."""
    visited = header.visited
    if visited[:1] != (0,) or visited[-1] != stage or len(visited) > rules.stages or header.hops_left < 0:
        raise IllegalPath(
            f"visited {list(visited)[:8]} with {header.hops_left} stages left is no path from stage 0 to "
            f"stage {stage}"
        )
    walked = begin(rules, header.length)
    for following in visited[1:]:
        walked = visit(walked, following, rules)
