"""The conditions of the links in a simulated world: latency, speed, disturbances, and blocked directions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from protocols.memory.conditions import Conditions
from protocols.memory.transport import MemoryNetwork
from swarmnet.identifiers import PeerId


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Conditions that a fault adds to all links of `these` peers; None: to all links."""

    these: frozenset[PeerId] | None
    conditions: Conditions


class LinkConditions:
    """Draws a latency for each pair of names and one speed, and applies them with all disturbances."""

    def __init__(self, network: MemoryNetwork, chance: Random) -> None:
        self.disturbances: list[Disturbance] = []
        self._network = network
        self._chance = chance
        self._bytes_per_second = chance.choice([float("inf"), float("inf"), float("inf"), 2e5])
        self._latency: dict[tuple[str, str], float] = {}
        self._blocks: Counter[tuple[PeerId, PeerId]] = Counter()

    def apply(self, peers: Mapping[str, PeerId]) -> None:
        """Apply the latencies and disturbances to the links between `peers`, given by name."""
        for source in peers:
            for target in peers:
                if source != target:
                    conditions = self._between(source, target, {peers[source], peers[target]})
                    self._network.set(peers[source], peers[target], conditions)

    def _between(self, source: str, target: str, ends: set[PeerId]) -> Conditions:
        pair = (source, target)
        if pair not in self._latency:
            self._latency[pair] = self._chance.choice([0.002, 0.02, 0.05, 0.12])
            self._latency[pair[::-1]] = self._latency[pair]
        found = dict.fromkeys(("lost", "repeated", "reordered", "corrupted"), 0.0)
        found["latency_seconds"] = self._latency[pair]
        for disturbance in self.disturbances:
            if disturbance.these is None or not disturbance.these.isdisjoint(ends):
                for name in found:
                    found[name] += getattr(disturbance.conditions, name)
        return Conditions(bytes_per_second=self._bytes_per_second, **found)

    def block(self, ways: Iterable[tuple[PeerId, PeerId]]) -> None:
        """Lose all messages in these directions until each block is lifted."""
        for way in ways:
            self._blocks[way] += 1
            if self._blocks[way] == 1:
                self._network.block(*way)

    def unblock(self, ways: Iterable[tuple[PeerId, PeerId]]) -> None:
        for way in ways:
            self._blocks[way] -= 1
            if not self._blocks[way]:
                self._network.unblock(*way)
