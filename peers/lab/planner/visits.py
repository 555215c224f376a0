"""How many microbatches visit each stage where some are left out, and the most that stages then carry.

Every microbatch visits the first stage, the last, and `middle` of those between, none twice; a share of them
may visit all.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_LEFT = 1e-9
"""Of the richest stage: what a stage that whole microbatches fill counts for the others."""
STEPS = 60
"""Of bisection: to the last bit that matters."""


def max_rate_with_skips(capacities: Sequence[float], middle: int) -> float:
    """Microbatches per second, if each leaves out whatever suits the swarm. `capacities`: of the stages.

    So many can be done as leave `middle` of them for each where no stage counts for more than all of them:
    the k richest stages are visited by all, for some k, and the others share the rest."""
    between = sorted(capacities[1:-1])
    rest = (
        sum(between[: len(between) - richest]) / (middle - richest) for richest in range(middle)
    )  # fmt: skip
    return min(capacities[0], capacities[-1], *rest)


def max_rate_mixed(capacities: Sequence[float], middle: int, whole: float) -> float:
    """As `max_rate_with_skips`, where the share `whole` of the microbatches visits every stage."""
    if not whole:
        return max_rate_with_skips(capacities, middle)
    low, high = 0.0, min(min(capacities) / whole, capacities[0], capacities[-1])
    for _ in range(STEPS):
        rate = (low + high) / 2
        if max_rate_with_skips(_left(capacities, rate * whole), middle) >= rate * (1 - whole):
            low = rate
        else:
            high = rate
    return low


def mixed_shares(capacities: Sequence[float], middle: int, whole: float) -> tuple[float, ...]:
    """As `visit_shares`, where the share `whole` of the microbatches visits every stage."""
    left = _left(capacities, max_rate_mixed(capacities, middle, whole) * whole)
    least = max(left) * MIN_LEFT
    others = visit_shares([max(one, least) for one in left], middle)
    return tuple(whole + (1 - whole) * part for part in others)


def _left(capacities: Sequence[float], used: float) -> list[float]:
    return [max(0.0, one - used) for one in capacities]


def visit_shares(capacities: Sequence[float], middle: int) -> tuple[float, ...]:
    """The part of the microbatches that visit each stage: by what it can do, and none more than once."""
    between = capacities[1:-1]
    low, high = 0.0, 1.0 / min(between) if between else 0.0
    for _ in range(STEPS):
        scale = (low + high) / 2
        if sum(min(1.0, scale * one) for one in between) < middle:
            low = scale
        else:
            high = scale
    return (1.0, *(min(1.0, high * one) for one in between), 1.0)
