"""Copy an archivist's counters into metrics."""

from __future__ import annotations

from peers.archivist.archivist import Archivist
from peers.state.archive import ArchivedCheckpoint
from peers.telemetry.counters import Growth
from peers.telemetry.metrics import PeerMetrics


class ArchiveObserver:
    """The metrics of one archivist with an open archive. Its series appear when this is created."""

    def __init__(self, archivist: Archivist, metrics: PeerMetrics) -> None:
        self.archivist, self.metrics = archivist, metrics.archive
        self.stages = len(archivist.manifest.stages)
        self.growth = Growth()
        self._seen: tuple[ArchivedCheckpoint, ...] | None = None
        self.metrics.show(self.stages)
        self.metrics.interval.set(archivist.policy.seconds)

    def look(self) -> None:
        """Update the metrics."""
        metrics, growth, archivist = self.metrics, self.growth, self.archivist
        entries = archivist.archive.entries
        if entries is not self._seen:  # It is replaced as a whole, now and then.
            self._seen = entries
            self._kept(entries)
        for stage, at in archivist.succeeded.items():
            metrics.succeeded(str(stage)).set(at)
        for stage, count in archivist.circle.serving.served_bytes.items():
            metrics.served(str(stage)).inc(growth.of("served", count, str(stage)))
        for (stage, reason), count in archivist.failures.items():
            metrics.failures(str(stage), reason).inc(growth.of(f"failures {stage}", count, reason))

    def _kept(self, entries: tuple[ArchivedCheckpoint, ...]) -> None:
        """Set the metrics of the archive's index."""
        of_stage: dict[int, list[ArchivedCheckpoint]] = {stage: [] for stage in range(self.stages)}
        for entry in entries:
            of_stage.get(entry.stage, []).append(entry)  # The index of another archive may name more stages.
        for stage, kept in of_stage.items():
            newest = max(kept, key=lambda entry: entry.round, default=None)
            name, metrics = str(stage), self.metrics
            metrics.round(name).set(newest.round if newest is not None else -1)
            metrics.bytes(name).set(sum(entry.bytes for entry in kept))
