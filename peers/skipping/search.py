"""What skipping is measured against: the best full pipeline that a long search finds.

The search may do what no real swarm can: it knows everything beforehand, gives every microbatch a way of its
own through all stages, lets any origin start any number of them in any order, and tries each change by
playing it: simulated annealing over those ways. How far it has converged: docs/benchmarks/skipping.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from random import Random

from peers.skipping.makespan import makespan
from peers.skipping.topologies import Topology
from swarmnet.bookings import Load
from swarmnet.chains import Chain, Places
from swarmnet.identifiers import PeerId
from swarmnet.paths import Rules, begin, choices, needs_swap, visit

Route = tuple[int, ...]

HOT, COLD = 2.0, 0.05
"""Seconds of makespan; hotter starts ended higher within the same steps."""


def search_full(topology: Topology, microbatches: int, steps: int, chance: Random) -> float:
    """The shortest time found for so many microbatches through all stages, in seconds."""
    members = [topology.peers_of(stage) for stage in range(topology.stages)]
    routes = [tuple(chance.choice(peers) for peers in members) for _ in range(microbatches)]
    best = seconds = makespan(topology, routes)
    for step in range(steps):
        changed = _changed(routes, members, chance)
        new_seconds = makespan(topology, changed)
        heat = HOT * (COLD / HOT) ** (step / steps)
        if new_seconds <= seconds or chance.random() < exp((seconds - new_seconds) / heat):
            routes, seconds = changed, new_seconds
            best = min(best, seconds)
    return best


def _changed(routes: list[Route], members: Sequence[Sequence[int]], chance: Random) -> list[Route]:
    """One peer of a way replaced, two ways exchanged in the order of start, or their ends exchanged."""
    changed = list(routes)
    one, other = chance.randrange(len(routes)), chance.randrange(len(routes))
    kind = chance.random()
    stage = chance.randrange(len(members))
    if kind < 0.6:
        route = routes[one]
        changed[one] = (*route[:stage], chance.choice(members[stage]), *route[stage + 1 :])
    elif kind < 0.8:
        changed[one], changed[other] = routes[other], routes[one]
    else:
        changed[one] = routes[one][:stage] + routes[other][stage:]
        changed[other] = routes[other][:stage] + routes[one][stage:]
    return changed


def random_skips(topology: Topology, rules: Rules, share: int, chance: Random) -> float:
    """Skipping that is blind to costs: every microbatch takes a legal way drawn by chance."""
    routes = []
    for origin in topology.peers_of(0):
        for _ in range(share):
            header, route = begin(rules), [origin]
            while header.hops_left:
                legal = [visit(header, stage, rules) for stage in choices(header, rules)]
                ahead = [h for h in legal if h.visited[-1] == h.frontier and not needs_swap(h, rules)]
                header = chance.choice(ahead)
                route.append(chance.choice(topology.peers_of(header.frontier)))
            routes.append(tuple(route))
    return makespan(topology, routes)


def places(topology: Topology, rules: Rules, load: Callable[[int], Load]) -> Places:
    """The topology as `chains.plan` sees it."""
    return Places(
        rules,
        {PeerId(str(peer)): stage for peer, stage in enumerate(topology.stage)},
        lambda a, b: topology.hop[int(a)][int(b)],
        lambda peer: load(int(peer)).compute_seconds,
    )


def play_chains(topology: Topology, chains: Sequence[Chain], share: int) -> float:
    """Every origin sends its microbatches down its own chain."""
    return makespan(topology, [tuple(int(peer) for peer in chain) for chain in chains for _ in range(share)])
