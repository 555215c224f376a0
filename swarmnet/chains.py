"""A plan for a stable swarm: one chain of peers per origin, annealed so that the slowest is fast.

SkipPipe's schedule comes to this: disjoint chains, one per origin, that together keep every peer's memory
within bounds (its search finds them by resolving conflicts; annealing finds as good ones in a fraction of
the time). Peers of the middle stages serve one chain each; those of the last stage hold no memory while they
wait, and are shared evenly. A plan is soft state: whoever finds its chain broken routes by pathfinder.py.
The run's owner gives it as an order (orders.py), for a while.

Pure and seeded. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp
from random import Random

from swarmnet.identifiers import PeerId
from swarmnet.paths import IllegalPath, Rules, begin, visit

Chain = tuple[PeerId, ...]
"""Origin first, a peer of the last stage at the end."""
STEPS = 6000
"""More found nothing better for 5 chains over 15 peers."""
HOT, COLD = 2.0, 0.02
"""Seconds of round trip that the first and the last step would give away about every third time."""
MEAN_WEIGHT = 0.02
"""Of equal longest chains, the plan with the shorter others is better: it leaves room for the unexpected."""


class NoPlan(ValueError):
    """There are too few peers for disjoint chains."""


@dataclass(frozen=True, slots=True)
class Places:
    """The swarm as the plan sees it."""

    rules: Rules
    stage: Mapping[PeerId, int]
    hop: Callable[[PeerId, PeerId], float]
    """One way between two peers, of a body."""
    compute: Callable[[PeerId], float]
    """Forward and backward of a microbatch."""

    def of(self, stage: int) -> list[PeerId]:
        return sorted(peer for peer, holds in self.stage.items() if holds == stage)

    def round_trip(self, chain: Chain) -> float:
        hops = sum(2 * self.hop(a, b) for a, b in pairwise(chain))
        return hops + sum(self.compute(peer) for peer in chain)

    def is_legal(self, chain: Chain) -> bool:
        header = begin(self.rules, len(chain))
        try:
            for peer in chain[1:]:
                header = visit(header, self.stage[peer], self.rules)
        except IllegalPath:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Told:
    """What one peer says of itself."""

    stage: int
    compute_seconds: float
    """Forward and backward of a microbatch."""
    hop_seconds: Mapping[PeerId, float]
    """One way of a body to its neighbours of the stages below."""


def places_of(rules: Rules, told: Mapping[PeerId, Told]) -> Places:
    """The swarm as its peers tell it, without swaps, for which nobody waits (pathfinder.py). Hops that nobody
    knows are no better than the longest that is known."""
    worst = max((hop for peer in told.values() for hop in peer.hop_seconds.values()), default=0.0)
    return Places(
        replace(rules, most_swaps=0),
        {peer: one.stage for peer, one in told.items()},
        lambda here, there: told[here].hop_seconds.get(there, worst),
        lambda peer: told[peer].compute_seconds,
    )


def longest(places: Places, chains: Sequence[Chain]) -> float:
    """The slowest chain's round trip, and a little of all."""
    trips = [places.round_trip(chain) for chain in chains]
    return max(trips) + MEAN_WEIGHT * sum(trips)


def plan(
    places: Places,
    chance: Random,
    steps: int = STEPS,
    cost: Callable[[Places, Sequence[Chain]], float] = longest,
) -> tuple[Chain, ...]:
    """Disjoint legal chains of the shortest length, one per peer of stage 0. Raises NoPlan."""
    chains, spare = _first(places)
    last = places.of(places.rules.last)
    now_cost = cost(places, chains)
    best, best_cost = chains, now_cost
    for step in range(steps):
        changed = _exchange(chains, spare, last, chance)
        if changed is None or not _stands(places, changed[0], len(last)):
            continue
        new_cost = cost(places, changed[0])
        heat = HOT * (COLD / HOT) ** (step / steps)
        if new_cost <= now_cost or chance.random() < exp((now_cost - new_cost) / heat):
            (chains, spare), now_cost = changed, new_cost
            if now_cost < best_cost:
                best, best_cost = chains, now_cost
    return tuple(best)


def _first(places: Places) -> tuple[list[Chain], list[PeerId]]:
    """Chains to begin with: always through the stages that have the most peers left."""
    rules = places.rules
    left = {stage: places.of(stage) for stage in range(1, rules.last)}
    last, chains = places.of(rules.last), list[Chain]()
    for number, origin in enumerate(places.of(0)):
        fullest = sorted(left, key=lambda stage: (-len(left[stage]), stage))[: rules.shortest - 2]
        if not last or any(not left[stage] for stage in fullest):
            raise NoPlan(f"{len(places.stage)} peers are too few for {len(places.of(0))} disjoint chains of "
                         f"{rules.shortest} stages")  # fmt: skip
        middle = tuple(left[stage].pop() for stage in sorted(fullest))
        chains.append((origin, *middle, last[number % len(last)]))
    if not _stands(places, chains, len(last)):
        raise NoPlan("the stages that have peers left are further apart than a path may jump")
    return chains, [peer for peers in left.values() for peer in peers]


def _stands(places: Places, chains: Sequence[Chain], last_peers: int) -> bool:
    ends = [chain[-1] for chain in chains]
    evenly = max(ends.count(peer) for peer in ends) <= ceil(len(chains) / last_peers)
    return evenly and all(places.is_legal(chain) for chain in chains)


def _exchange(
    chains: list[Chain], spare: list[PeerId], last: list[PeerId], chance: Random
) -> tuple[list[Chain], list[PeerId]] | None:
    """Two places in the plan change their peers, a place and a spare peer do, or a chain ends elsewhere."""
    changed, left = [list(chain) for chain in chains], list(spare)
    one = chance.choice(changed)
    kind = chance.random()
    if kind < 0.3 or len(one) == 2:
        other = chance.choice(changed)
        if kind < 0.15:
            one[-1], other[-1] = other[-1], one[-1]
        else:
            one[-1] = chance.choice(last)
    else:
        place = chance.randrange(1, len(one) - 1)
        number = chance.randrange(len(changed) * (len(one) - 2) + len(left))
        if number < len(left):
            one[place], left[number] = left[number], one[place]
        else:
            chain, position = divmod(number - len(left), len(one) - 2)
            other = changed[chain]
            one[place], other[position + 1] = other[position + 1], one[place]
    return [tuple(chain) for chain in changed], left
