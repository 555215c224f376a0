"""With stage skipping: the share of microbatches that visit each stage, and the maximum rate of the stages.

Every microbatch visits the first stage, the last, and `middle` of the stages between, none twice. A share of
the microbatches may visit all stages.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_LEFT = 1e-9
"""Capacity left in a stage that full-path microbatches fill, as a share of the richest stage's; not zero."""
STEPS = 60
"""Steps of bisection; enough for float precision."""


def max_rate_with_skips(capacities: Sequence[float], middle: int) -> float:
    """Return the maximum microbatches per second, if each skips the stages that suit the swarm best.

    `capacities`: microbatches per second of each stage. At the maximum, all microbatches visit the k richest
    middle stages for some k, and the other middle stages share the remaining visits.
    """
    between = sorted(capacities[1:-1])
    rest = (sum(between[: len(between) - richest]) / (middle - richest) for richest in range(middle))
    return min(capacities[0], capacities[-1], *rest)


def max_rate_mixed(capacities: Sequence[float], middle: int, whole: float) -> float:
    """Return `max_rate_with_skips` if the share `whole` of the microbatches visits every stage."""
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
    """Return `visit_shares` if the share `whole` of the microbatches visits every stage."""
    left = _left(capacities, max_rate_mixed(capacities, middle, whole) * whole)
    least = max(left) * MIN_LEFT
    others = visit_shares([max(one, least) for one in left], middle)
    return tuple(whole + (1 - whole) * part for part in others)


def _left(capacities: Sequence[float], used: float) -> list[float]:
    return [max(0.0, one - used) for one in capacities]


def visit_shares(capacities: Sequence[float], middle: int) -> tuple[float, ...]:
    """Return the share of microbatches that visit each stage: in proportion to its capacity, at most 1."""
    between = capacities[1:-1]
    low, high = 0.0, 1.0 / min(between) if between else 0.0
    for _ in range(STEPS):
        scale = (low + high) / 2
        if sum(min(1.0, scale * one) for one in between) < middle:
            low = scale
        else:
            high = scale
    return (1.0, *(min(1.0, high * one) for one in between), 1.0)
