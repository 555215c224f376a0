"""For every role: once a second a directory's and a relay's counters become metrics; now and then p2pd's
connections do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from peers.network.counted_directory import CountedDirectory
from peers.telemetry.counters import OBSERVE_SECONDS, Growth, by_code
from peers.telemetry.metrics import Metrics
from protocols.daemon.multiaddr import is_circuit
from protocols.errors import PeerGone
from protocols.reachability.relay_service import RelayService
from swarmnet.identifiers import PeerId

CONNECTIONS_EVERY = 10
"""Looks: p2pd is asked, and names every peer that is connected."""
ANSWER_SECONDS = 2.5
"""For p2pd; it watches itself by as much (CHECK_DEADLINE_SECONDS in protocols/daemon/p2pd.py)."""

Connections = Callable[[float], Awaitable[Sequence[tuple[PeerId, str]]]]
"""The peer and the other end of each, within so many seconds; PeerGone if p2pd does not say."""


class DirectorySeen(Protocol):
    """What is read of a directory (DhtDirectory)."""

    @property
    def measured_offset(self) -> float | None: ...

    @property
    def known_nodes(self) -> int: ...

    @property
    def refusals(self) -> Counter[str]: ...

    @property
    def sent_bytes(self) -> int: ...

    @property
    def received_bytes(self) -> int: ...


class DirectoryObserver:
    """A directory's counters as metrics."""

    def __init__(
        self,
        counted: CountedDirectory,
        directory: DirectorySeen,
        metrics: Metrics,
        connections: Connections | None = None,
    ) -> None:
        self.counted, self.directory, self.network = counted, directory, metrics.network
        self.connections = connections
        self.growth = Growth()

    async def run(self) -> None:
        looks = 0
        while True:
            self.look()
            if looks % CONNECTIONS_EVERY == 0:
                await self.look_at_connections()
            looks += 1
            await asyncio.sleep(OBSERVE_SECONDS)

    def look(self) -> None:
        network, growth = self.network, self.growth
        # As measured, not what is gone by: that is 0 as long as records of a wrong clock are still taken.
        offset = self.directory.measured_offset
        if offset is not None:
            network.clock_offset.set(offset)
        network.nodes.set(self.directory.known_nodes)
        network.sent("directory").inc(growth.of("sent", self.directory.sent_bytes))
        network.received("directory").inc(growth.of("received", self.directory.received_bytes))
        for (operation, outcome), count in self.counted.ended.items():
            network.directory(operation, outcome).inc(growth.of(operation, count, outcome))
        for what, seconds in self.counted.timings.read():
            network.directory_seconds(what).observe(seconds)
        for code, count in by_code(self.directory.refusals).items():
            network.refused(code).inc(growth.of("refused", count, code))

    async def look_at_connections(self) -> None:
        """Left as it was while p2pd does not answer: it is about to be started again."""
        if self.connections is not None:
            with suppress(PeerGone):
                found = await self.connections(ANSWER_SECONDS)
                relayed = sum(is_circuit(address) for _, address in found)
                self.network.connections("relayed").set(relayed)
                self.network.connections("direct").set(len(found) - relayed)


class RelayObserver:
    """Of one relay, which lives as long as its p2pd; the next one counts from 0."""

    def __init__(self, relay: RelayService, metrics: Metrics) -> None:
        self.relay, self.metrics = relay, metrics.relay
        self.growth = Growth()

    def look(self) -> None:
        """Update the metrics."""
        relay, metrics, growth = self.relay, self.metrics, self.growth
        metrics.circuits.set(relay.circuits)
        metrics.carried.inc(growth.of("carried", relay.carried_bytes))
        for reason, count in relay.refused.items():
            metrics.refused(reason).inc(growth.of("refused", count, reason))

    def end(self) -> None:
        """p2pd ends, and all circuits with it."""
        self.look()
        self.metrics.circuits.set(0)
