"""Metrics of stored and relayed data: checkpoints, an archive, circuits."""

from __future__ import annotations

from peers.telemetry.metric_kinds import Declare, Label
from peers.telemetry.reasons import ARCHIVING, RELAYING


class CheckpointMetrics:
    """Checkpoints that a worker writes."""

    def __init__(self, declare: Declare) -> None:
        self.saved = declare.gauge(
            "checkpoint_last_success_timestamp_seconds",
            "Time of the newest checkpoint.",
        )
        self.interval = declare.gauge(
            "checkpoint_interval_seconds",
            "Seconds between checkpoints, from the peer file; 0: only when leaving, or none.",
        )
        self.disk_free = declare.gauge("disk_free_bytes", "Free bytes on the disk of the state folder.")


class ArchiveMetrics:
    """The archive of an archivist. Its series are by stage and appear with `show`."""

    def __init__(self, declare: Declare) -> None:
        stage = Label("stage")
        self.round = declare.gauges("archive_round", "Newest archived round, number; -1: none.", stage)
        self.succeeded = declare.gauges(
            "archive_last_success_timestamp_seconds",
            "Time of the last successful check of the stage: a newer checkpoint was archived, or none was "
            "offered; 0: not yet.",
            stage,
        )
        self.bytes = declare.gauges("archive_size_bytes", "Bytes of the checkpoints kept.", stage)
        self.served = declare.counters(
            "archive_served_bytes_total",
            "Bytes of weights sent to newcomers, lost ones included.",
            stage,
        )
        self.failures = declare.counters(
            "archive_failures_total",
            "Checks without an archived checkpoint, by reason.",
            stage,
            Label("reason", tuple(ARCHIVING)),
        )
        self.interval = declare.gauge(
            "archive_interval_seconds",
            "Seconds between checks, from the peer file.",
        )

    def show(self, stages: int) -> None:
        """Create all series of a run with this many stages. A call with labels creates a metric's series."""
        gauges = (self.round, self.succeeded, self.bytes)
        for stage in map(str, range(stages)):
            for gauge in gauges:
                gauge(stage)
            self.served(stage)
            for reason in ARCHIVING:
                self.failures(stage, reason)


class RelayMetrics:
    """What a bootstrap relays between peers that cannot dial each other."""

    def __init__(self, declare: Declare) -> None:
        self.circuits = declare.gauge(
            "relay_circuits",
            "Circuits through this peer, open or being opened.",
        )
        self.refused = declare.counters(
            "relay_refused_total",
            "Slots and circuits refused, by reason.",
            Label("reason", tuple(RELAYING)),
        )
        self.carried = declare.counter(
            "relay_carried_bytes_total", "Bytes relayed through circuits, both directions."
        )
