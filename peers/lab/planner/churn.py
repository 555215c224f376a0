"""Peers that leave and join: played in the simulator, and computed beside it.

An hour of a large swarm cannot be played in a minute, and a tenth of the peers leaving in it costs too little
to be seen in a few seconds. So leaving is hastened until `PLAYED_AWAY` of the peers are away at any time,
and what that costs is divided by the same factor: while few are away, twice as many cost twice as much.
Absences keep their length, and some are away when the watching begins.
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
"""From a newcomer's start to its first contribution, without the download: 6.8 s alone, 11.7 on a busy
machine (docs/benchmarks/demo.md)."""
PLAYED_AWAY = 0.05
SHARES = 4096
"""Steps by which `thinnest_share` adds up: a large stage misses a few of thousands."""
WEIGHT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Turnover:
    """Who leaves how often, and for how long its place is empty."""

    per_second: float
    """Of every peer: its chance to leave in a second."""
    away_seconds: tuple[float, ...]
    """By place: until somebody has joined instead, started and fetched the stage."""

    def hastened(self) -> float:
        away = self.per_second * sum(self.away_seconds) / len(self.away_seconds)
        return max(1.0, PLAYED_AWAY / away)


def turnover(manifest: Manifest, question: PlanRequest, peers: Sequence[PeerSpec]) -> Turnover:
    sizes = [state_layout(manifest, stage).size for stage in range(len(manifest.stages))]
    away = tuple(JOIN_SECONDS + WEIGHT_BYTES * sizes[peer.stage] / peer.down for peer in peers)
    return Turnover(question.churn / 3600.0, away)


class Play:
    """Kills the peers of a swarm at random and lets others join in their places, from now until `until`."""

    def __init__(self, swarm: Swarm, turnover: Turnover, seed: int, until: float) -> None:
        self.swarm, self.until = swarm, until
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
    """What is left of the thinnest stage's capacity on average, while of each stage so many peers are missing
    on average, by chance (Poisson). One that is missing holds up the whole swarm by its part of its stage;
    those that are missing in several stages at once do so by no more than the worst of these."""
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
    """The share of the speed that churn costs: a peer that leaves is missed by its stage, and so by all,
    until another has joined in its place; what was under way at it, so many seconds of the swarm's work in
    all, is computed again elsewhere."""
    capacity, stages = layout.capacity(), layout.stages()
    present = thinnest_share(
        [sum(capacity[peer] for peer in peers) / part for peers, part in zip(stages, visited, strict=True)],
        [len(peers) for peers in stages],
        [turnover.per_second * sum(turnover.away_seconds[peer] for peer in peers) for peers in stages],
    )
    return 1.0 - present * max(0.0, 1.0 - turnover.per_second * under_way_seconds)
