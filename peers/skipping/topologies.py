"""Seeded swarms on a map: sites, what a hop between them takes, and which peer holds which stage.

The sites are twelve cities. What lies between two of them is derived, not drawn, from their distance:

- one way takes `distance / 200 km per ms` (light in glass) times 1.5 (cables do not follow great circles),
  and 3 ms for the access lines at both ends. London - New York comes to 90 ms there and back, Tokyo - San
  Francisco to 130, London - Sydney to 261; public ping tables have 75, 110 and 270;
- a connection carries `4 MiB per round trip` at most: the send buffer that Linux grants one TCP connection
  (net.ipv4.tcp_wmem), and two p2pd keep one connection between them (docs/log.md). On short ways the line
  is the limit, 500 Mbit/s.

Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import asin, cos, exp, radians, sin, sqrt
from random import Random

SITES = {
    "New York": (40.7, -74.0),
    "San Francisco": (37.8, -122.4),
    "Sao Paulo": (-23.5, -46.6),
    "London": (51.5, -0.1),
    "Frankfurt": (50.1, 8.7),
    "Warsaw": (52.2, 21.0),
    "Johannesburg": (-26.2, 28.0),
    "Mumbai": (19.1, 72.9),
    "Singapore": (1.3, 103.8),
    "Seoul": (37.6, 127.0),
    "Tokyo": (35.7, 139.7),
    "Sydney": (-33.9, 151.2),
}
"""Latitude and longitude in degrees."""

EARTH_KM = 6371.0
GLASS_KM_PER_SECOND = 200_000.0
DETOUR = 1.5
ACCESS_SECONDS = 0.003
CONNECTION_BYTES = 4 * 2**20
LINE_BYTES_PER_SECOND = 500e6 / 8
SAME_SITE_SECONDS = 0.001
"""Two peers of one city: the reference has 1 ms between machines of a region."""

BODY_BYTES = 32 * 2**20
"""Hidden states of a microbatch: the size in SkipPipe's released schedule."""
FORWARD_SECONDS = 0.44
"""Compute of one stage, the same schedule's."""
COPY_SECONDS = 0.35
"""Constant part of a hop, its copies between GPU and memory."""
STAGE_SIZES = (5, 3, 3, 3, 3, 3)
"""Peers per stage, the same schedule's."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Peers 0 .. n - 1 with their stages and all hops between them."""

    site: tuple[str, ...]
    stage: tuple[int, ...]
    latency: tuple[tuple[float, ...], ...]
    """One way, of a message without a body."""
    hop: tuple[tuple[float, ...], ...]
    """Of a body."""
    forward: tuple[float, ...]
    """Compute seconds of a microbatch's forward."""
    memory: int
    """Microbatches between forward and backward that a peer has memory for."""

    @property
    def stages(self) -> int:
        return max(self.stage) + 1

    def peers_of(self, stage: int) -> tuple[int, ...]:
        return tuple(peer for peer, holds in enumerate(self.stage) if holds == stage)


def latency_seconds(a: str, b: str) -> float:
    """One way between two sites."""
    if a == b:
        return SAME_SITE_SECONDS
    (lat_a, lon_a), (lat_b, lon_b) = ((radians(x), radians(y)) for x, y in (SITES[a], SITES[b]))
    half = sin((lat_b - lat_a) / 2) ** 2 + cos(lat_a) * cos(lat_b) * sin((lon_b - lon_a) / 2) ** 2
    kilometres = 2 * EARTH_KM * asin(sqrt(half))
    return kilometres / GLASS_KM_PER_SECOND * DETOUR + ACCESS_SECONDS


def bytes_per_second(a: str, b: str) -> float:
    return min(LINE_BYTES_PER_SECOND, CONNECTION_BYTES / (2 * latency_seconds(a, b)))


def hop_seconds(a: str, b: str) -> float:
    """Until the hidden states of a microbatch are there: the reference's time model."""
    return latency_seconds(a, b) + BODY_BYTES / bytes_per_second(a, b) + COPY_SECONDS


def draw(seed: int, memory: int = 3, sizes: tuple[int, ...] = STAGE_SIZES) -> Topology:
    """Peers at sites drawn by chance; each holds the stage that it happened to join."""
    chance = Random(seed)
    count = sum(sizes)
    names = list(SITES)
    site = tuple(chance.choice(names) for _ in range(count))
    stage = tuple(number for number, size in enumerate(sizes) for _ in range(size))
    return Topology(
        site,
        stage,
        tuple(tuple(latency_seconds(a, b) for b in site) for a in site),
        tuple(tuple(hop_seconds(a, b) for b in site) for a in site),
        (FORWARD_SECONDS,) * count,
        memory,
    )


PLACING_STEPS = 20_000
"""More changed the score by less than a hundredth on the first topologies."""


def placed(topology: Topology, seed: int) -> Topology:
    """The same peers with their stages annealed for the full pipeline: every stage near the next one.

    The score is what DT-FM (arXiv:2206.01288) calls pipeline cost, with the mean of the nearest hops in place
    of its bottleneck matching, which is as good here and needs no solver.
    """
    chance = Random(seed)
    stage = list(topology.stage)
    score = _pipeline_seconds(topology, stage)
    best, best_score = list(stage), score
    for step in range(PLACING_STEPS):
        a, b = chance.sample(range(len(stage)), 2)
        stage[a], stage[b] = stage[b], stage[a]
        changed = _pipeline_seconds(topology, stage)
        heat = 0.3 * 0.01 ** (step / PLACING_STEPS)
        if changed <= score or chance.random() < exp((score - changed) / heat):
            score = changed
            if score < best_score:
                best, best_score = list(stage), score
        else:
            stage[a], stage[b] = stage[b], stage[a]
    return _in_order(topology, best)


def _pipeline_seconds(topology: Topology, stage: list[int]) -> float:
    """Over all boundaries: from a peer to the nearest of the next stage, and back, on average."""
    members: list[list[int]] = [[] for _ in range(max(stage) + 1)]
    for peer, holds in enumerate(stage):
        members[holds].append(peer)
    seconds = 0.0
    for above, below in pairwise(members):
        for here, there in ((above, below), (below, above)):
            seconds += sum(min(topology.hop[a][b] for b in there) for a in here) / len(here)
    return seconds


def _in_order(topology: Topology, stage: list[int]) -> Topology:
    """Peers numbered by stage again."""
    order = sorted(range(len(stage)), key=lambda peer: stage[peer])
    return replace(
        topology,
        site=tuple(topology.site[peer] for peer in order),
        stage=tuple(stage[peer] for peer in order),
        latency=tuple(tuple(topology.latency[a][b] for b in order) for a in order),
        hop=tuple(tuple(topology.hop[a][b] for b in order) for a in order),
        forward=tuple(topology.forward[peer] for peer in order),
    )
