"""A swarm to be simulated, as data: what each peer has to give, who knows whom, and what lies between them.

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
    """What one peer has to give."""

    stage: int
    forward_seconds: float
    """Compute of a microbatch's forward; backward takes `Work.backward_ratio` times as long."""
    up: float = inf
    down: float = inf
    slots: int = 32
    in_flight: int = 64
    """Microbatches of its own; for peers of the first stage."""
    window: int | None = None
    """So many are kept under way all the time; None: `Flow` decides."""
    region: str = ""
    loss: float = 0.0
    """Share of the packets that cross its line."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a microbatch costs, the same for all stages but for the peers' speeds."""

    body_bytes: int
    """Hidden states, and as much again for their gradient."""
    backward_ratio: float = 2.0
    scatter: float = 0.1
    """Compute times are drawn evenly from +- this share of their mean."""


@dataclass(frozen=True, slots=True)
class SwarmLayout:
    """A swarm to be simulated."""

    peers: tuple[PeerSpec, ...]
    latency: Callable[[int, int], float]
    """One way, between two peers by their numbers."""
    work: Work
    below: tuple[tuple[int, ...], ...] | None = None
    """Peers of the stages within reach ahead that each peer knows; None: all."""
    cores: int = 0
    """Of the one machine that all peers share; 0: each has its own."""
    rules: PathRules | None = None
    """Which stages microbatches may leave out; None: each visits all, in order."""
    connection: Callable[[int, int], float] | None = None
    """What one connection between two peers carries at most; None: what their lines do."""
    taken: tuple[float, ...] = ()
    """Bytes per second that contributions take of each peer's line, up and down alike, by stage; empty:
    none."""

    def line(self, place: int) -> LinkBandwidth:
        """What is left of the line of a peer's computer for bodies."""
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
        """Stages between neighbours on a way."""
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
        """Microbatches per second of each peer: its computer, or its line if that takes longer."""
        ratio = 1 + self.work.backward_ratio
        each = {stage: self.crossing(stage) for stage in {peer.stage for peer in self.peers}}
        return tuple(
            carried(1.0 / (peer.forward_seconds * ratio), self.line(place), each[peer.stage])
            for place, peer in enumerate(self.peers)
        )

    def crossing(self, stage: int) -> Crossing:
        """Of a microbatch at a peer of this stage."""
        body = self.work.body_bytes
        return crossing(stage, 1 + max(peer.stage for peer in self.peers), body, body)
