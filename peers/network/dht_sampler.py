"""For every role: once a second a directory's and a relay's counters become metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

from peers.network.counted_directory import CountedDirectory
from peers.telemetry.counters import OBSERVE_SECONDS, Growth, by_code
from peers.telemetry.metrics import Metrics
from protocols.reachability.relay_service import RelayService


class DirectorySeen(Protocol):
    """What is read of a directory (DhtDirectory)."""

    @property
    def measured_offset(self) -> float | None: ...

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
    ) -> None:
        self.counted, self.directory, self.network = counted, directory, metrics.network
        self.growth = Growth()

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(OBSERVE_SECONDS)

    def look(self) -> None:
        network, growth = self.network, self.growth
        # As measured, not what is gone by: that is 0 as long as records of a wrong clock are still taken.
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
