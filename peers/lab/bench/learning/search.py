"""Which trials a method's figures take: a search for its rates, then every seed at the best of them.

A plan plays nothing: it asks for trials and is sent their outcomes. So the same trials are played whether
that happens one after the other or many at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TypeAlias

from peers.lab.bench.learning.trials import Outcome, Rates

FACTOR = 2.0
"""Between the rates of the search; the same grid for every method."""
MAX_RATES = 7
"""Of one search: 64 times from the lowest to the highest."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a plan ends with."""

    rates_tried: int
    outcomes: list[Outcome]
    """Of each seed, at the best rates."""


Wanted: TypeAlias = list[tuple[Rates, int]]
"""Rates and seeds: trials of one method that do not wait for one another."""
Plan: TypeAlias = Generator[Wanted, list[Outcome], SearchResult]
"""Takes the outcomes in the order in which it asked for them."""
_Search: TypeAlias = Generator[Wanted, list[Outcome], tuple[Rates, int]]


def plan(begin: Rates, seeds: int, searches: bool) -> Plan:
    """Search from these rates on, with the first seed, or take them as they are; then play all seeds.

    The rate outside, where there is one, is searched for at the best rate inside.
    """
    best, tried = begin, 1
    if searches:
        best, tried = yield from _searched(begin, lambda rates, by: replace(rates, rate=by * rates.rate))
    if searches and best.outer is not None:
        best, more = yield from _searched(
            best, lambda rates, by: replace(rates, outer=by * (rates.outer or 0))
        )
        tried += more - 1
    outcomes = yield [(best, seed) for seed in range(seeds)]
    return SearchResult(tried, outcomes)


def _searched(begin: Rates, moved: Callable[[Rates, float], Rates]) -> _Search:
    """Where the neighbours on the grid are worse, and how many rates it took."""
    losses: dict[Rates, float] = {}
    wanted = begin
    while True:
        (outcome,) = yield [(wanted, 0)]
        losses[wanted] = outcome.loss
        best = min(losses, key=lambda rates: losses[rates])
        missing = [rates for by in (FACTOR, 1 / FACTOR) if (rates := moved(best, by)) not in losses]
        if not missing or len(losses) == MAX_RATES:
            return best, len(losses)
        wanted = missing[0]


def carried_out(
    plans: Mapping[str, Plan], at_once: int, begin: Callable[[str, Rates, int], Future[Outcome]]
) -> dict[str, SearchResult]:
    """Let so many of the plans go on at a time. `begin`: a method's trial at these rates from a seed."""
    waiting, found = deque(plans.items()), dict[str, SearchResult]()
    under_way: dict[str, tuple[Plan, list[Future[Outcome]]]] = {}

    def go_on(name: str, plan: Plan, outcomes: list[Outcome] | None) -> None:
        try:
            wanted = next(plan) if outcomes is None else plan.send(outcomes)
        except StopIteration as ended:
            found[name] = ended.value
        else:
            under_way[name] = plan, [begin(name, rates, seed) for rates, seed in wanted]

    while waiting or under_way:
        while waiting and len(under_way) < at_once:
            name, fresh = waiting.popleft()
            go_on(name, fresh, None)
        missing = [trial for _, trials in under_way.values() for trial in trials if not trial.done()]
        wait(missing, return_when=FIRST_COMPLETED)
        for name, (plan, trials) in list(under_way.items()):
            if all(trial.done() for trial in trials):
                del under_way[name]
                go_on(name, plan, [trial.result() for trial in trials])
    return found
