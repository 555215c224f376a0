"""A swarm to be simulated, as data: the peers' compute and links, which peers know each other, and latencies.

Times in seconds, sizes in bytes, speeds in bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from swarmnet.resources.link_bandwidth import Crossing, LinkBandwidth, carried, crossing
from swarmnet.run.path_rules import PathRules


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """Compute, link and limits of one peer."""

    stage: int
    forward_seconds: float
    """Seconds of a microbatch's forward pass; backward takes `Work.backward_ratio` times as long."""
    up: float = inf
    down: float = inf
    slots: int = 32
    in_flight: int = 64
    """Maximum number of own microbatches in flight; only for peers of the first stage."""
    window: int | None = None
    """Constant number of own microbatches in flight; None: `Flow` decides."""
    region: str = ""
    loss: float = 0.0
    """Share of the packets that its link loses."""


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of a microbatch, the same for all stages."""

    body_bytes: int
    """Bytes of the hidden states; their gradient has as many."""
    backward_ratio: float = 2.0
    scatter: float = 0.1
    """Compute times are drawn uniformly from their mean +- this share of it."""


@dataclass(frozen=True, slots=True)
class SwarmLayout:
    """A swarm to be simulated."""

    peers: tuple[PeerSpec, ...]
    latency: Callable[[int, int], float]
    """One-way latency between two peers, given by their numbers."""
    work: Work
    below: tuple[tuple[int, ...], ...] | None = None
    """Peers that each peer knows, of the following stages within `reach`; None: all of them."""
    cores: int = 0
    """CPU cores that all peers share; 0: each peer has its own."""
    rules: PathRules | None = None
    """How microbatches skip stages; None: each visits all stages in order."""
    connection: Callable[[int, int], float] | None = None
    """Maximum of one connection between two peers; None: only their links limit it."""
    taken: tuple[float, ...] = ()
    """Bandwidth of contributions on each peer's link, the same up and down, by stage; empty: none."""

    def line(self, place: int) -> LinkBandwidth:
        """Return the bandwidth of a peer's link that contributions leave for bodies."""
        peer = self.peers[place]
        line = LinkBandwidth(peer.up, peer.down)
        return line.without(self.taken[peer.stage]) if self.taken else line

    def stages(self) -> tuple[tuple[int, ...], ...]:
        count = 1 + max(peer.stage for peer in self.peers)
        found: list[list[int]] = [[] for _ in range(count)]
        for number, peer in enumerate(self.peers):
            found[peer.stage].append(number)
        return tuple(tuple(numbers) for numbers in found)

    @property
    def reach(self) -> int:
        """Return how many stages ahead the next peer on a path may be; 1 without skipping."""
        return 1 if self.rules is None else self.rules.reach

    def known_below(self) -> tuple[tuple[int, ...], ...]:
        if self.below is not None:
            return self.below
        stages = self.stages()
        return tuple(
            tuple(number for stage in stages[peer.stage + 1 :][: self.reach] for number in stage)
            for peer in self.peers
        )

    def capacity(self) -> tuple[float, ...]:
        """Return each peer's microbatches per second, limited by its compute or its link."""
        ratio = 1 + self.work.backward_ratio
        each = {stage: self.crossing(stage) for stage in {peer.stage for peer in self.peers}}
        return tuple(
            carried(1.0 / (peer.forward_seconds * ratio), self.line(place), each[peer.stage])
            for place, peer in enumerate(self.peers)
        )

    def crossing(self, stage: int) -> Crossing:
        """Return the bytes that a microbatch sends and receives at a peer of this stage."""
        body = self.work.body_bytes
        return crossing(stage, 1 + max(peer.stage for peer in self.peers), body, body)
