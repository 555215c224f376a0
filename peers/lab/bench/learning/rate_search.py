"""Search for a method's learning rates, then run every seed at the best ones.

A plan runs no trials: it is a generator that yields the trials it needs and receives their outcomes. The same
trials therefore run whether this happens one at a time or in parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TypeAlias

from peers.lab.bench.learning.trials import Outcome, Rates

FACTOR = 2.0
"""Ratio of adjacent learning rates of the search; the same grid for every method."""
MAX_RATES = 7
"""Maximum number of rates in a search; the highest is at most 64 times the lowest."""
MAX_PAIRS = 24
"""Maximum number of pairs of an inner and an outer rate in a search."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a plan."""

    rates_tried: int
    outcomes: list[Outcome]
    """Outcome of each seed, at the best rates."""


Wanted: TypeAlias = list[tuple[Rates, int]]
"""Rates and seeds of trials of one method that can run in parallel."""
Plan: TypeAlias = Generator[Wanted, list[Outcome], SearchResult]
"""Yields trials, and receives their outcomes in the same order."""
_Search: TypeAlias = Generator[Wanted, list[Outcome], tuple[Rates, int]]


def plan(begin: Rates, seeds: int, searches: bool) -> Plan:
    """Yield the trials of one method: a search from the rates `begin` if `searches`, then all seeds.

    The search uses the first seed. Where there is an outer learning rate, both are searched together, because
    the best of each depends on the other.
    """
    best, tried = begin, 1
    if searches:
        best, tried = yield from _search(begin)
    outcomes = yield [(best, seed) for seed in range(seeds)]
    return SearchResult(tried, outcomes)


def _search(begin: Rates) -> _Search:
    """Return rates whose neighbours on the grid are worse, and the number of rates that were tried."""
    losses: dict[Rates, float] = {}
    limit = MAX_RATES if begin.outer is None else MAX_PAIRS
    wanted = begin
    while True:
        (outcome,) = yield [(wanted, 0)]
        losses[wanted] = outcome.loss
        best = min(losses, key=lambda rates: losses[rates])
        missing = [rates for rates in _neighbours(best) if rates not in losses]
        if not missing or len(losses) == limit:
            return best, len(losses)
        wanted = missing[0]


def _neighbours(rates: Rates) -> list[Rates]:
    """Return the adjacent rates. With an outer rate, the outer one also changes alone, and against the inner
    one: a step's size depends on their product."""
    up, down = FACTOR * rates.rate, rates.rate / FACTOR
    near = [replace(rates, rate=up), replace(rates, rate=down)]
    if rates.outer is None:
        return near
    high, low = FACTOR * rates.outer, rates.outer / FACTOR
    alone = [replace(rates, outer=high), replace(rates, outer=low)]
    return near + alone + [Rates(up, low), Rates(down, high)]


def carried_out(
    plans: Mapping[str, Plan], at_once: int, begin: Callable[[str, Rates, int], Future[Outcome]]
) -> dict[str, SearchResult]:
    """Run the plans, `at_once` at a time. `begin` starts a method's trial at given rates with a seed."""
    waiting, found = deque(plans.items()), dict[str, SearchResult]()
    under_way: dict[str, tuple[Plan, list[Future[Outcome]]]] = {}

    def resume(name: str, plan: Plan, outcomes: list[Outcome] | None) -> None:
        try:
            wanted = next(plan) if outcomes is None else plan.send(outcomes)
        except StopIteration as ended:
            found[name] = ended.value
        else:
            under_way[name] = plan, [begin(name, rates, seed) for rates, seed in wanted]

    while waiting or under_way:
        while waiting and len(under_way) < at_once:
            name, fresh = waiting.popleft()
            resume(name, fresh, None)
        missing = [trial for _, trials in under_way.values() for trial in trials if not trial.done()]
        wait(missing, return_when=FIRST_COMPLETED)
        for name, (plan, trials) in list(under_way.items()):
            if all(trial.done() for trial in trials):
                del under_way[name]
                resume(name, plan, [trial.result() for trial in trials])
    return found
