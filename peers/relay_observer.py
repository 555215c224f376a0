"""What a relay carries and refuses, as metrics."""

from __future__ import annotations

from peers.growth import Growth
from peers.metrics import Metrics
from protocols.relay_service import RelayService


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
