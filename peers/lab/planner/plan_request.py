"""Input and output of the planner: the peers and their network, and the speed that they reach."""

from __future__ import annotations

from dataclasses import dataclass

from peers.lab.planner.planned_links import Links
from peers.lab.planner.speeds import PeerClass

BACKWARD_RATIO = 2.0
"""Time of a backward pass divided by a forward pass: two matrix products per weight instead of one."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The peers and the network for which a run is planned."""

    classes: tuple[PeerClass, ...]
    latency: tuple[float, float] = (0.005, 0.15)
    """Minimum and maximum one-way latency between two peers in seconds, drawn uniformly."""
    churn: float = 0.0
    """Share of the peers that leave in an hour; as many join."""
    tokens: int | None = None
    """Tokens that the run trains; None: until its learning rate has decayed."""
    cores: int = 0
    """CPU cores that all peers share; 0: each peer has its own."""
    slots: int = 32
    """`slots` and `in_flight` of the peers' files."""
    simulated: int = 0
    """Number of peers to simulate; 0: as many as take about a minute."""
    seed: int = 0
    links: Links | None = None
    """Latency and bandwidth between regions; replaces `latency`."""

    def between(self) -> Links:
        """Return the links between peers: `links`, or links with `latency` everywhere."""
        return self.links or Links.everywhere(self.latency)


@dataclass(frozen=True, slots=True)
class Churn:
    """The speed that a swarm loses by churn."""

    leaving: float = 0.0
    """Peers that leave per hour."""
    costs: float = 0.0
    """Lost share of the speed, as simulated."""
    computed: float = 0.0
    """Lost share of the speed, as computed by arithmetic."""
    deaths: int = 0
    """Number of simulated departures."""
    hastened: float = 1.0
    """Speedup of churn in the simulation: how many times as often peers left as they will."""


@dataclass(frozen=True, slots=True)
class SinglePeerBaseline:
    """The fastest peer, training the whole model alone."""

    tokens_per_second: float
    needs: int
    """Bytes of memory for the whole model and a plain optimizer."""
    has: int
    """Bytes of memory of the peer; 0: unknown."""

    @property
    def fits(self) -> bool:
        return not self.has or self.needs <= self.has


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of the speed in tokens per second; each one adds one limit to the bound before it."""

    summed: float
    """All peers compute, each with the whole model."""
    compute: float
    """All peers compute, in the stages where they are placed."""
    lines: float
    """Links carry activations and gradients, without contributions."""
    exchange: float
    """Links carry contributions as well."""
    played: float
    """Simulated, with queues and latencies."""

    @property
    def strongest(self) -> str:
        """Return the limit that costs the largest share of the bound before it, or "compute"."""
        steps = {
            "how peers fit into stages": (self.summed, self.compute),
            "links: bytes of microbatches": (self.compute, self.lines),
            "links: bytes of contributions": (self.lines, self.exchange),
            "waits and latencies": (self.exchange, self.played),
        }
        name = min(steps, key=lambda name: steps[name][1] / steps[name][0])
        left = steps[name][1] / steps[name][0]
        return name if left < CLEARLY else "compute"


CLEARLY = 0.95
"""A limit that leaves more than this share of the speed is not named as the bottleneck."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The estimated speed, duration and traffic of a run."""

    peers: tuple[int, ...]
    """Peers of each stage."""
    capacity: tuple[float, ...]
    """Tokens per second of each stage alone, if all microbatches visited it."""
    visited: tuple[float, ...]
    """Share of the microbatches that visit each stage."""
    simulated: int
    """Number of simulated peers."""
    most: float
    """Tokens per second: the maximum flow after contributions, or the limit of the shared cores."""
    tokens_per_second: float
    """Speed without churn, after the full-path warm-up."""
    churned: float
    """Speed with churn, after the full-path warm-up."""
    churn: Churn
    full_path_warmup_rounds: int
    """First rounds of the run in which microbatches skip no stage, counted in the first stage; 0: none."""
    whole: float
    """Tokens per second in the full-path warm-up, with churn."""
    days: float
    """Days to train `target` tokens."""
    target: int
    data_bytes: tuple[float, ...]
    """Activation and gradient bytes that a peer of each stage sends in a day; it receives as many."""
    update_bytes: tuple[float, ...]
    """Contribution bytes that a peer of each stage sends in a day; it receives as many."""
    round_seconds: tuple[float, ...]
    """Seconds of a round in each stage."""
    line_share: float
    """Largest share of a peer's link that contributions take."""
    full_line_share: float
    """The same share if every peer contributed to every round of `global_batch_tokens`."""
    bounds: Bounds
    alone: SinglePeerBaseline
    memory: tuple[int, ...]
    """Bytes that a peer of each stage needs."""
    left_out: tuple[PeerClass, ...] = ()
    """Peer classes whose memory is too small for every stage."""

    @property
    def utilisation(self) -> float:
        """Return the speed with churn as a share of what all peers could compute."""
        return self.churned / self.bounds.summed

    @property
    def slower_than_one(self) -> bool:
        """Return whether the swarm is slower than its fastest peer would be alone."""
        return self.alone.fits and self.churned < self.alone.tokens_per_second

    @property
    def weakest(self) -> int:
        """Return the stage with the least capacity for the microbatches that visit it."""
        return min(range(len(self.capacity)), key=lambda stage: self.capacity[stage] / self.visited[stage])
