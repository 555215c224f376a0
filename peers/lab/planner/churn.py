"""The cost of churn: simulated, and estimated by arithmetic for comparison.

The simulator cannot play an hour of a large swarm in a minute. If a tenth of the peers leave in an hour, a
few seconds are too short to show the cost. The simulator therefore speeds up churn until `PLAYED_AWAY` of the
peers are away at any time, and divides the cost by the same factor. This is valid while few are away: twice
as many cost twice as much. Absences keep their length, and some peers are away when the measurement begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from peers.lab.planner.layout import PeerSpec, SwarmLayout
from peers.lab.planner.plan_request import PlanRequest
from peers.lab.planner.simulator import Swarm
from swarmnet.model.state_layout import state_layout
from swarmnet.run.manifest import Manifest

JOIN_SECONDS = 10.0
"""Seconds from a newcomer's start to its first contribution, without the download.

Measured: 6.8 s alone, 11.7 s on a busy machine (docs/benchmarks/demo.md)."""
PLAYED_AWAY = 0.05
"""Share of the peers that are away at any time in the simulation."""
SHARES = 4096
"""Integration steps of `thinnest_share`; fine enough for a large stage that lacks a few of thousands."""
WEIGHT_BYTES = 4
"""Bytes of a parameter that a newcomer downloads."""


@dataclass(frozen=True, slots=True)
class Turnover:
    """How often peers leave, and how long their places stay empty."""

    per_second: float
    """Probability that a given peer leaves within a second."""
    away_seconds: tuple[float, ...]
    """Seconds, by place, until a replacement has joined, started and fetched the stage."""

    def hastened(self) -> float:
        """Return the speedup of churn at which `PLAYED_AWAY` of the peers are away; at least 1."""
        away = self.per_second * sum(self.away_seconds) / len(self.away_seconds)
        return max(1.0, PLAYED_AWAY / away)


def turnover(manifest: Manifest, question: PlanRequest, peers: Sequence[PeerSpec]) -> Turnover:
    """Return the turnover of these peers at the churn of the request."""
    sizes = [state_layout(manifest, stage).size for stage in range(len(manifest.stages))]
    away = tuple(JOIN_SECONDS + WEIGHT_BYTES * sizes[peer.stage] / peer.down for peer in peers)
    return Turnover(question.churn / 3600.0, away)


class Play:
    """Remove peers of a swarm at random and let others join in their places, from now until `until`."""

    def __init__(self, *, swarm: Swarm, turnover: Turnover, seed: int, until: float) -> None:
        self.swarm = swarm
        self.until = until
        self.away_seconds = turnover.away_seconds
        self.per_second = turnover.per_second * turnover.hastened()
        self.chance = Random(seed)
        self.deaths = 0
        for place, seconds in enumerate(self.away_seconds):
            away = self.per_second * seconds / (1 + self.per_second * seconds)
            if self.chance.random() < away:
                swarm.kill(place)
                swarm.events.after(self.chance.random() * seconds, self._comes, place)
            else:
                self._will_go(place)

    def _will_go(self, place: int) -> None:
        at = self.swarm.events.now + self.chance.expovariate(self.per_second)
        if at < self.until:
            self.swarm.events.at(at, self._goes, place)

    def _goes(self, place: int) -> None:
        self.deaths += 1
        self.swarm.kill(place)
        self.swarm.events.after(self.away_seconds[place], self._comes, place)

    def _comes(self, place: int) -> None:
        self.swarm.join(place)
        self._will_go(place)


def thinnest_share(capacity: Sequence[float], peers: Sequence[int], missing: Sequence[float]) -> float:
    """Return the mean share of the thinnest stage's capacity that churn leaves.

    `missing` is the mean number of absent peers in each stage; the number is Poisson distributed. An absent
    peer slows the whole swarm by its part of its stage. If peers are absent in several stages at once, only
    the worst of these stages counts.
    """
    least = min(capacity)
    left = torch.linspace(0.0, 1.0, SHARES + 1, dtype=torch.float64)
    at_least = torch.ones_like(left)
    for has, count, mean in zip(capacity, peers, missing, strict=True):
        spared = torch.floor(count * (1.0 - left * least / has) + 1e-9)
        at_least *= torch.special.gammaincc(spared + 1.0, torch.full_like(left, max(mean, 1e-12)))
    return float(torch.trapezoid(at_least, left))


def computed(
    turnover: Turnover, layout: SwarmLayout, visited: Sequence[float], under_way_seconds: float
) -> float:
    """Return the share of the speed that churn costs, by arithmetic.

    The stage of a peer that leaves is slower until another peer has joined in its place, and so is the whole
    swarm. Other peers compute its microbatches in flight again; in all, the swarm's microbatches in flight
    are `under_way_seconds` of its work.
    """
    capacity, stages = layout.capacity(), layout.stages()
    present = thinnest_share(
        [sum(capacity[peer] for peer in peers) / part for peers, part in zip(stages, visited, strict=True)],
        [len(peers) for peers in stages],
        [turnover.per_second * sum(turnover.away_seconds[peer] for peer in peers) for peers in stages],
    )
    return 1.0 - present * max(0.0, 1.0 - turnover.per_second * under_way_seconds)
