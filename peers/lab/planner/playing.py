"""A swarm that is placed, played: what it comes to, which stages are visited, what churn costs.

Of a swarm that would take longer than about a minute a sample is played, every kind of peer in its
proportion: a peer knows `KNOWN_BELOW` peers of the next stage however large that is, so what it sees is
alike.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

from peers.lab.planner import losses, max_flow
from peers.lab.planner.churn import Play, Turnover
from peers.lab.planner.layout import PeerSpec, SwarmLayout
from peers.lab.planner.simulator import Swarm
from peers.lab.planner.visits import max_rate_mixed, mixed_shares
from swarmnet.routing.load_balancer import Router

KNOWN_BELOW = 16
WINDOW = 2.5
"""Microbatches under way, in those that the way itself holds: what `Flow` comes to
(docs/benchmarks/removed.md)."""
WARM_PATHS, MEASURED_PATHS = 6.0, 3.0
"""How long is played, in times that an unhindered microbatch takes past average peers. Routers give more to a
fast, distant peer with each answer: four swarms were steady after 4, one with 256 slots after 6."""
STEADY, MAX_PATHS = 1.1, 30.0
"""What grows by more than this from one watching to the next is watched again, so long at most: a swarm of 32
stages stood at 8 % of its flow after 6, at 62 % after 12."""
CHURNED_PATHS = 0.5
"""From the first who leave to the watching."""
MIN_MICROBATCHES = 1000
PLAYED_DEATHS = 60
"""Where swarms are small: their price is then known to a fifth."""
VISITS = 200_000
"""Microbatches times stages that are played: 40 s of a core that has other work, too."""
MIN_PLAYED = 300
LATENCIES = 500
"""Pairs of peers whose latency is looked at for its mean."""


@dataclass(frozen=True, slots=True)
class Course:
    """What a microbatch meets on its way through a layout. Times in seconds, rates in microbatches/s."""

    most: float
    """That the swarm could do at once."""
    visited: tuple[float, ...]
    """By which part of the microbatches, if they go where there is room."""
    path: float
    """Unhindered, past peers who get as much as they can do."""
    slow_path: float
    """Past average peers."""
    stages: float
    """That it visits, on the mean."""


@dataclass(frozen=True, slots=True)
class Played:
    rate: float
    """Microbatches per second."""
    visited: tuple[float, ...]
    """By which part of the microbatches, as it came."""
    churn_costs: float = 0.0
    """Share of the rate, by the churn that was asked for."""
    deaths: int = 0


def course(layout: SwarmLayout, seed: int) -> Course:
    capacity, stages = layout.capacity(), layout.stages()
    sums = [sum(capacity[peer] for peer in peers) for peers in stages]
    if layout.rules is None or len(stages) < 3:
        most, visited, on_way = max_flow.most(stages, capacity), (1.0,) * len(stages), float(len(stages))
    else:
        on_way, middle = layout.rules.mean_length(0), layout.rules.shortest - 2
        whole = layout.rules.full_path_fraction
        most, visited = max_rate_mixed(sums, middle, whole), mixed_shares(sums, middle, whole)
    cores = layout.cores
    if cores:
        forward = [sum(layout.peers[p].forward_seconds for p in peers) / len(peers) for peers in stages]
        seconds = sum(part * each for part, each in zip(visited, forward, strict=True))
        most = min(most, cores / (seconds * (1 + layout.work.backward_ratio)))
    network = 2 * (on_way - 1) * mean_hop(layout, seed)
    quick = [len(peers) / has for peers, has in zip(stages, sums, strict=True)]
    slow = [sum(1 / capacity[peer] for peer in peers) / len(peers) for peers in stages]
    path, slow_path = (
        network + sum(part * each for part, each in zip(visited, times, strict=True))
        for times in (quick, slow)
    )
    return Course(most, visited, path, slow_path, on_way)


def mean_hop(layout: SwarmLayout, seed: int) -> float:
    """Seconds of a body from peer to peer, without what it keeps their lines busy."""
    chance, count, size = Random(seed), len(layout.peers), layout.work.body_bytes
    pairs = [(chance.randrange(count), chance.randrange(count)) for _ in range(LATENCIES)]
    total = 0.0
    for a, b in pairs:
        latency = layout.latency(a, b)
        loss = losses.of_both(layout.peers[a].loss, layout.peers[b].loss)
        total += latency + size / losses.carries(loss, 2 * latency) + losses.repeated(loss, 2 * latency, size)
    return total / len(pairs)


def playable(layout: SwarmLayout, way: Course, slots: int, plays: int, churns: bool) -> int:
    """How many of the peers can be played, if a swarm is played `plays` times, and once with churn."""
    under_way = sum(_windows(layout, way, slots).values())
    rate = min(way.most, under_way / way.path)
    paths = plays * (WARM_PATHS + MEASURED_PATHS) + churns * (CHURNED_PATHS + MEASURED_PATHS)
    visits = rate * way.stages * paths * way.slow_path
    count = len(layout.peers)
    return max(MIN_PLAYED, min(count, int(count * VISITS / visits)))


def play(layout: SwarmLayout, way: Course, slots: int, seed: int, turnover: Turnover | None) -> Played:
    """`turnover`: whose price is to be found; None: nobody leaves."""
    swarm = Swarm(_ready(layout, way, slots, seed), Router, seed)
    with _without_collector():
        swarm.start()
        swarm.run((WARM_PATHS - MEASURED_PATHS) * way.slow_path)
        before, _ = _watched(swarm, MEASURED_PATHS * way.slow_path)
        measured = max(MEASURED_PATHS * way.slow_path, MIN_MICROBATCHES / way.most)
        rate, visited = _watched(swarm, measured)
        while (rate > STEADY * before or not rate) and swarm.events.now < MAX_PATHS * way.slow_path:
            before = rate
            rate, visited = _watched(swarm, measured)
        if layout.rules is None:
            visited = way.visited
        if turnover is None or rate <= 0:
            return Played(rate, visited)
        leaving = turnover.per_second * turnover.hastened() * len(layout.peers)
        affordable = VISITS / 2 / (way.most * way.stages)
        seconds = max(MEASURED_PATHS * way.slow_path, min(PLAYED_DEATHS / leaving, affordable))
        settled = swarm.events.now + CHURNED_PATHS * way.slow_path
        churning = Play(swarm, turnover, seed, settled + seconds)
        swarm.run(settled)
        left, _ = _watched(swarm, seconds)
    costs = max(0.0, 1.0 - left / rate) / turnover.hastened()
    return Played(rate, visited, costs, churning.deaths)


def _watched(swarm: Swarm, seconds: float) -> tuple[float, tuple[float, ...]]:
    """Microbatches per second that come back, and which part of them each stage has committed."""
    finished, committed = swarm.finished, _committed(swarm)
    swarm.run(swarm.events.now + seconds)
    done = [after - before for after, before in zip(_committed(swarm), committed, strict=True)]
    shares = (min(1.0, one / max(1, done[0])) for one in done[1:-1])
    return (swarm.finished - finished) / seconds, (1.0, *shares, 1.0)


def _committed(swarm: Swarm) -> list[int]:
    counts = [0] * (swarm.last_stage + 1)
    for peer in swarm.peers:
        counts[peer.spec.stage] += peer.pipeline.ledger.committed
    return counts


def _ready(layout: SwarmLayout, way: Course, slots: int, seed: int) -> SwarmLayout:
    """Every peer knows some of each stage within reach, and origins how many to keep under way."""
    stages, chance, windows = layout.stages(), Random(seed), _windows(layout, way, slots)

    def known(peer: PeerSpec) -> Iterator[int]:
        for following in stages[peer.stage + 1 :][: layout.reach]:
            yield from chance.sample(following, min(KNOWN_BELOW, len(following)))

    peers = tuple(replace(peer, window=windows.get(number)) for number, peer in enumerate(layout.peers))
    return replace(layout, peers=peers, below=tuple(tuple(known(peer)) for peer in peers))


def _windows(layout: SwarmLayout, way: Course, slots: int) -> dict[int, int]:
    """Microbatches that each origin keeps under way: what `Flow` comes to, by what it can do."""
    capacity, first = layout.capacity(), layout.stages()[0]
    each = WINDOW * way.most * way.path / sum(capacity[peer] for peer in first)
    return {peer: min(slots, 2 + round(each * capacity[peer])) for peer in first}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of small objects that are in no cycles: looking for some takes an eighth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
