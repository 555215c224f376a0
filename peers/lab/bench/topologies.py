"""Swarms on a map, from a seed: the peers' sites and stages, and the time of a hop between two sites.

The sites are twelve cities. Latency and bandwidth between two of them follow from their distance:

- The latency one way is `distance / 200 km per ms` (light in glass) times 1.5 (cables do not follow great
  circles), and 3 ms for the access links at both ends. London - New York has a round trip of 90 ms, Tokyo -
  San Francisco 130, London - Sydney 261; public ping tables have 75, 110 and 270.
- A connection carries at most `4 MiB per round trip`: Linux's send buffer of one TCP connection
  (net.ipv4.tcp_wmem). Two p2pd keep one connection between them (docs/lessons.md). On short distances the
  link is the limit, 500 Mbit/s.

Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import asin, cos, radians, sin, sqrt
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
"""Latency between two peers of one city: the reference has 1 ms within a region."""

BODY_BYTES = 32 * 2**20
"""Bytes of a microbatch's hidden states, from SkipPipe's released schedule."""
FORWARD_SECONDS = 0.44
"""Forward seconds of one stage, from the same schedule."""
COPY_SECONDS = 0.35
"""Constant part of a hop: copies between GPU and memory."""
STAGE_SIZES = (5, 3, 3, 3, 3, 3)
"""Peers of each stage, from the same schedule."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Peers 0 to n - 1 with their sites and stages, and the times of all hops between them."""

    site: tuple[str, ...]
    stage: tuple[int, ...]
    latency: tuple[tuple[float, ...], ...]
    """One-way seconds of a message without a body, by sender and receiver."""
    hop: tuple[tuple[float, ...], ...]
    """Seconds of a body, by sender and receiver."""
    forward: tuple[float, ...]
    """Seconds of a microbatch's forward pass on each peer."""
    memory: int
    """Maximum number of microbatches between forward and backward on a peer."""

    @property
    def stages(self) -> int:
        return max(self.stage) + 1


def latency_seconds(a: str, b: str) -> float:
    """Return the one-way latency between two sites."""
    if a == b:
        return SAME_SITE_SECONDS
    (lat_a, lon_a), (lat_b, lon_b) = ((radians(x), radians(y)) for x, y in (SITES[a], SITES[b]))
    half = sin((lat_b - lat_a) / 2) ** 2 + cos(lat_a) * cos(lat_b) * sin((lon_b - lon_a) / 2) ** 2
    kilometres = 2 * EARTH_KM * asin(sqrt(half))
    return kilometres / GLASS_KM_PER_SECOND * DETOUR + ACCESS_SECONDS


def bytes_per_second(a: str, b: str) -> float:
    return min(LINE_BYTES_PER_SECOND, CONNECTION_BYTES / (2 * latency_seconds(a, b)))


def hop_seconds(a: str, b: str) -> float:
    """Return the seconds to send the hidden states of a microbatch, by the reference's time model."""
    return latency_seconds(a, b) + BODY_BYTES / bytes_per_second(a, b) + COPY_SECONDS


def draw(seed: int, memory: int = 3, sizes: tuple[int, ...] = STAGE_SIZES) -> Topology:
    """Draw a topology: peers at random sites; the stages do not depend on the sites."""
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
