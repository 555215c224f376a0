"""Copy the counters of a DHT node and a relay into metrics once a second, and p2pd's connections every tenth
time. All roles use it.
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
"""Number of samples between two requests to p2pd, which lists every connected peer."""
ANSWER_SECONDS = 2.5
"""Timeout for p2pd in seconds, equal to that of its supervision (`CHECK_DEADLINE_SECONDS` in
protocols/daemon/p2pd.py)."""

Connections = Callable[[float], Awaitable[Sequence[tuple[PeerId, str]]]]
"""Returns the peer and remote address of each connection within the given seconds. Raises PeerGone if p2pd is
silent."""


class DirectorySeen(Protocol):
    """The properties of a directory that are sampled (`DhtDirectory`)."""

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
    """Copies a directory's counters into metrics."""

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
        """Update the metrics."""
        network, growth = self.network, self.growth
        # The measured offset, not the applied one, which is 0 while a wrong clock's records are still
        # accepted.
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
        """Update the connection metrics. They stay unchanged if p2pd does not answer: it is about to be
        restarted."""
        if self.connections is not None:
            with suppress(PeerGone):
                found = await self.connections(ANSWER_SECONDS)
                relayed = sum(is_circuit(address) for _, address in found)
                self.network.connections("relayed").set(relayed)
                self.network.connections("direct").set(len(found) - relayed)


class RelayObserver:
    """Copies the counters of one relay into metrics. A relay lives as long as its p2pd; the next counts from
    0."""

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
        """Update the metrics a last time. Called when p2pd ends, and all circuits with it."""
        self.look()
        self.metrics.circuits.set(0)
