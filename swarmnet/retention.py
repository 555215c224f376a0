"""Which archived checkpoints are kept: the newest ones, and sparsely those from before."""

from __future__ import annotations

from collections.abc import Collection


def kept(rounds: Collection[int], interval_rounds: int, newest: int, every: int) -> set[int]:
    """Of one stage's archived `rounds` the `newest` so many, and of the older ones each `every`-th possible
    one, counted from the run's start in steps of `interval_rounds`: whoever archives keeps the same. `every`
    0: none of them."""
    ordered = sorted(rounds, reverse=True)
    step = interval_rounds * every
    return set(ordered[:newest]) | {round for round in ordered if step and (round + 1) % step == 0}
