"""Copy an archivist's counters into metrics."""

from __future__ import annotations

from peers.stageless.archivist.archivist import Archivist
from peers.state.archive import ArchivedCheckpoint
from peers.telemetry.counters import Growth
from peers.telemetry.metrics import PeerMetrics


class ArchiveObserver:
    """The metrics of one archivist with an open archive. Its series appear when this is created."""

    def __init__(self, archivist: Archivist, metrics: PeerMetrics) -> None:
        self.archivist = archivist
        self.metrics = metrics.archive
        self.stages = len(archivist.manifest.stages)
        self.growth = Growth()
        self._sampled_entries: tuple[ArchivedCheckpoint, ...] | None = None
        self.metrics.show(self.stages)
        self.metrics.interval.set(archivist.policy.seconds)

    def look(self) -> None:
        """Copy the archivist's state into the metrics. `growth.of` returns the increase of a number since its
        last call for the same labels, and the counters grow by that."""
        metrics, growth, archivist = self.metrics, self.growth, self.archivist
        entries = archivist.archive.entries
        if entries is not self._sampled_entries:  # The tuple is replaced when the index changes.
            self._sampled_entries = entries
            self._update_index_metrics(entries)
        for stage, at in archivist.succeeded.items():
            metrics.succeeded(str(stage)).set(at)
        for stage, count in archivist.circle.serving.served_bytes.items():
            metrics.served(str(stage)).inc(growth.of("served", count, str(stage)))
        for (stage, reason), count in archivist.failures.items():
            metrics.failures(str(stage), reason).inc(growth.of(f"failures {stage}", count, reason))

    def _update_index_metrics(self, entries: tuple[ArchivedCheckpoint, ...]) -> None:
        """Set the newest round and the size of each stage from the archive's index; round -1: none."""
        by_stage: dict[int, list[ArchivedCheckpoint]] = {stage: [] for stage in range(self.stages)}
        for entry in entries:
            by_stage.get(entry.stage, []).append(entry)  # The index may name more stages than the run has.
        for stage, stage_entries in by_stage.items():
            newest = max(stage_entries, key=lambda entry: entry.round, default=None)
            label, metrics = str(stage), self.metrics
            metrics.round(label).set(newest.round if newest is not None else -1)
            metrics.bytes(label).set(sum(entry.bytes for entry in stage_entries))
