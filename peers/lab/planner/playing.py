"""Simulate a placed swarm: its speed, the share of microbatches in each stage, and the cost of churn.

If the whole swarm would take longer than about a minute, a sample is simulated, with each kind of peer in
proportion. The sample behaves like the swarm, because a peer knows `KNOWN_BELOW` peers of the next stage in
any swarm.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

from peers.lab.planner import losses
from peers.lab.planner.churn import Play, Turnover
from peers.lab.planner.layout import PeerSpec, SwarmLayout
from peers.lab.planner.simulator import Swarm
from peers.lab.planner.visits import max_rate_mixed, mixed_shares
from swarmnet.routing.load_balancer import Router

KNOWN_BELOW = 16
"""Peers of each following stage that a peer knows."""
WINDOW = 2.5
"""Microbatches in flight, divided by those that fill an idle path; `Flow` converges to this
(docs/benchmarks/removed.md)."""
WARM_PATHS, MEASURED_PATHS = 6.0, 3.0
"""Simulated time before and during a measurement, in path times of average peers.

Routers give more to a fast, distant peer with each response. Four swarms were steady after 4 path times, one
with 256 slots after 6."""
STEADY, MAX_PATHS = 1.1, 30.0
"""A measurement is repeated if the rate grew by more than this factor, up to this many path times.

A swarm of 32 stages had 8 % of its flow after 6 path times, and 62 % after 12."""
CHURNED_PATHS = 0.5
"""Path times from the first departure to the measurement."""
MIN_MICROBATCHES = 1000
"""Minimum number of microbatches in a measurement."""
PLAYED_DEATHS = 60
"""Number of departures in small swarms; this gives the cost of churn to a fifth."""
VISITS = 200_000
"""Microbatches times stages in a simulation: 40 s on a core that has other work, too."""
MIN_PLAYED = 300
"""Minimum number of simulated peers."""
LATENCIES = 500
"""Pairs of peers that are sampled for the mean latency."""


@dataclass(frozen=True, slots=True)
class Course:
    """Path of a microbatch through a layout, by arithmetic. Times in seconds, rates in microbatches/s."""

    most: float
    """Maximum rate of the swarm."""
    visited: tuple[float, ...]
    """Share of the microbatches that visit each stage, if they go where there is capacity."""
    path: float
    """Time of a path without queues, with peers chosen in proportion to their capacity."""
    slow_path: float
    """Time of a path without queues, with peers chosen uniformly."""
    stages: float
    """Mean number of stages that a microbatch visits."""


@dataclass(frozen=True, slots=True)
class Played:
    """Result of a simulation."""

    rate: float
    """Microbatches per second."""
    visited: tuple[float, ...]
    """Share of the microbatches that visited each stage."""
    churn_costs: float = 0.0
    """Share of the rate that the requested churn costs."""
    deaths: int = 0


def course(layout: SwarmLayout, seed: int) -> Course:
    """Return the maximum rate and the path times of a layout, by arithmetic."""
    capacity, stages = layout.capacity(), layout.stages()
    sums = [sum(capacity[peer] for peer in peers) for peers in stages]
    if layout.rules is None or len(stages) < 3:
        most, visited, on_way = min(sums), (1.0,) * len(stages), float(len(stages))
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
    """Return the mean seconds of a body from peer to peer, without the transfer time on their links."""
    chance, count, size = Random(seed), len(layout.peers), layout.work.body_bytes
    pairs = [(chance.randrange(count), chance.randrange(count)) for _ in range(LATENCIES)]
    total = 0.0
    for a, b in pairs:
        latency = layout.latency(a, b)
        loss = losses.of_both(layout.peers[a].loss, layout.peers[b].loss)
        total += latency + size / losses.carries(loss, 2 * latency) + losses.repeated(loss, 2 * latency, size)
    return total / len(pairs)


def playable(layout: SwarmLayout, way: Course, slots: int, plays: int, churns: bool) -> int:
    """Return how many peers can be simulated in about a minute.

    The swarm is simulated `plays` times, and once more with churn if `churns`.
    """
    under_way = sum(_windows(layout, way, slots).values())
    rate = min(way.most, under_way / way.path)
    paths = plays * (WARM_PATHS + MEASURED_PATHS) + churns * (CHURNED_PATHS + MEASURED_PATHS)
    visits = rate * way.stages * paths * way.slow_path
    count = len(layout.peers)
    return max(MIN_PLAYED, min(count, int(count * VISITS / visits)))


def play(layout: SwarmLayout, way: Course, slots: int, seed: int, turnover: Turnover | None) -> Played:
    """Simulate a swarm; with `turnover`, measure the cost of churn as well."""
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
        churning = Play(swarm=swarm, turnover=turnover, seed=seed, until=settled + seconds)
        swarm.run(settled)
        left, _ = _watched(swarm, seconds)
    costs = max(0.0, 1.0 - left / rate) / turnover.hastened()
    return Played(rate, visited, costs, churning.deaths)


def _watched(swarm: Swarm, seconds: float) -> tuple[float, tuple[float, ...]]:
    """Run for `seconds`; return the microbatches per second, and the share that each stage committed."""
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
    """Return the layout with the peers that each peer knows, and the windows of the origins."""
    stages, chance, windows = layout.stages(), Random(seed), _windows(layout, way, slots)

    def known(peer: PeerSpec) -> Iterator[int]:
        for following in stages[peer.stage + 1 :][: layout.reach]:
            yield from chance.sample(following, min(KNOWN_BELOW, len(following)))

    peers = tuple(replace(peer, window=windows.get(number)) for number, peer in enumerate(layout.peers))
    return replace(layout, peers=peers, below=tuple(tuple(known(peer)) for peer in peers))


def _windows(layout: SwarmLayout, way: Course, slots: int) -> dict[int, int]:
    """Return the microbatches in flight of each origin, by place: what `Flow` converges to."""
    capacity, first = layout.capacity(), layout.stages()[0]
    each = WINDOW * way.most * way.path / sum(capacity[peer] for peer in first)
    return {peer: min(slots, 2 + round(each * capacity[peer])) for peer in first}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector: there are no cycles here, and it takes an eighth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
