"""Copy the counters of a DHT node and a relay into metrics once a second. All roles use it.

The counters only grow. `growth.of` returns the increase since its last call with the same arguments, and
metrics are incremented by that."""

from __future__ import annotations

import asyncio

from peers.network.counted_directory import CountedDirectory
from peers.telemetry.counters import OBSERVE_SECONDS, Growth, by_code
from peers.telemetry.metrics import PeerMetrics
from protocols.dht.directory import DhtDirectory
from protocols.reachability.relay_service import RelayService


class DirectoryObserver:
    """Copies a directory's counters into metrics."""

    def __init__(
        self,
        counted: CountedDirectory,
        directory: DhtDirectory,
        metrics: PeerMetrics,
    ) -> None:
        self.counted = counted
        self.directory = directory
        self.network = metrics.network
        self.growth = Growth()

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(OBSERVE_SECONDS)

    def look(self) -> None:
        """Update the metrics of the directory: clock offset, bytes, outcomes of its operations, refusals."""
        network, growth = self.network, self.growth
        # The measured offset, because the applied one is 0 while records with a wrong time are accepted.
        offset = self.directory.measured_offset
        if offset is not None:
            network.clock_offset.set(offset)
        network.sent("directory").inc(growth.of("sent", self.directory.sent_bytes))
        network.received("directory").inc(growth.of("received", self.directory.received_bytes))
        for (operation, outcome), count in self.counted.ended.items():
            network.directory(operation, outcome).inc(growth.of(operation, count, outcome))
        for code, count in by_code(self.directory.refusals).items():
            network.refused(code).inc(growth.of("refused", count, code))


class RelayObserver:
    """Copies the counters of one relay into metrics. It lives as long as its p2pd; the next counts from 0."""

    def __init__(self, relay: RelayService, metrics: PeerMetrics) -> None:
        self.relay = relay
        self.metrics = metrics.relay
        self.growth = Growth()

    def look(self) -> None:
        """Update the metrics of the relay: open circuits, carried bytes, refusals by reason."""
        relay, metrics, growth = self.relay, self.metrics, self.growth
        metrics.circuits.set(relay.circuits)
        metrics.carried.inc(growth.of("carried", relay.carried_bytes))
        for reason, count in relay.refused.items():
            metrics.refused(reason).inc(growth.of("refused", count, reason))

    def end(self) -> None:
        """Update the metrics a last time. Called when p2pd ends, and all circuits with it."""
        self.look()
        self.metrics.circuits.set(0)
