"""What is asked of a plan, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from peers.lab.planner.links import Links
from peers.lab.planner.speeds import PeerClass

BACKWARD_RATIO = 2.0
"""Two matrix products per weight backward, one forward."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    classes: tuple[PeerClass, ...]
    latency: tuple[float, float] = (0.005, 0.15)
    """Seconds one way between two peers, drawn evenly."""
    churn: float = 0.0
    """Share of the peers that leave in an hour, as many joining."""
    tokens: int | None = None
    """The run's target; None: until its learning rate has come down."""
    cores: int = 0
    """Cores that all peers share; 0: each has its own."""
    slots: int = 32
    """`slots` and `in_flight` of the peers' files."""
    simulated: int = 0
    """So many peers; 0: as many as a minute is enough for."""
    seed: int = 0
    links: Links | None = None
    """Instead of `latency`."""

    def between(self) -> Links:
        return self.links or Links.everywhere(self.latency)


@dataclass(frozen=True, slots=True)
class Churn:
    """What a given churn costs."""

    leaving: float = 0.0
    """Peers per hour."""
    costs: float = 0.0
    """Share of the speed, as it was played."""
    computed: float = 0.0
    """The same by arithmetic."""
    deaths: int = 0
    """That were played."""
    hastened: float = 1.0
    """They came so many times as fast as they will."""


@dataclass(frozen=True, slots=True)
class SinglePeerBaseline:
    """The fastest peer without the others."""

    tokens_per_second: float
    needs: int
    """Bytes of memory for the whole model and a plain optimizer."""
    has: int
    """Bytes; 0: not said."""

    @property
    def fits(self) -> bool:
        return not self.has or self.needs <= self.has


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tokens per second, each with one more thing that takes of them."""

    summed: float
    """What all peers could compute, each with the whole model."""
    compute: float
    """In the stages where they are."""
    lines: float
    """That lines carry besides, as if nobody contributed."""
    exchange: float
    """Beside contributions."""
    played: float
    """As it came, with waits and latencies."""

    @property
    def strongest(self) -> str:
        """What takes the largest share of what was left before it."""
        steps = {
            "how peers fit into stages": (self.summed, self.compute),
            "lines: what microbatches send": (self.compute, self.lines),
            "lines: contributions": (self.lines, self.exchange),
            "waits and latencies": (self.exchange, self.played),
        }
        name = min(steps, key=lambda name: steps[name][1] / steps[name][0])
        left = steps[name][1] / steps[name][0]
        return name if left < CLEARLY else "compute"


CLEARLY = 0.95
"""What leaves more than this bounds nothing."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    peers: tuple[int, ...]
    """Per stage."""
    capacity: tuple[float, ...]
    """Tokens per second of each stage alone, if all microbatches visited it."""
    visited: tuple[float, ...]
    """By which part of the microbatches."""
    simulated: int
    most: float
    """Tokens per second: the maximum flow beside contributions, or what the shared cores can do."""
    tokens_per_second: float
    """Without churn, after the rounds that are whole."""
    churned: float
    """With it."""
    churn: Churn
    full_path_warmup_rounds: int
    """Of the first stage, from the run's beginning, that leave nothing out; 0: none."""
    whole: float
    """Tokens per second in them, with churn."""
    days: float
    target: int
    data_bytes: tuple[float, ...]
    """Per peer of each stage and day, sent; as much is received."""
    update_bytes: tuple[float, ...]
    round_seconds: tuple[float, ...]
    """Per stage."""
    line_share: float
    """The largest part of a line that updates take."""
    full_line_share: float
    """And would if every peer contributed to every round of `global_batch_tokens`."""
    bounds: Bounds
    alone: SinglePeerBaseline
    memory: tuple[int, ...]
    """Bytes that a peer of each stage needs."""
    left_out: tuple[PeerClass, ...] = ()
    """Whose memory no stage fits in."""

    @property
    def utilisation(self) -> float:
        """Of what all peers could compute."""
        return self.churned / self.bounds.summed

    @property
    def slower_than_one(self) -> bool:
        return self.alone.fits and self.churned < self.alone.tokens_per_second

    @property
    def weakest(self) -> int:
        """The stage that microbatches wait for first."""
        return min(range(len(self.capacity)), key=lambda stage: self.capacity[stage] / self.visited[stage])
