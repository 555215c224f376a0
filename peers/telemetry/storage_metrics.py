"""Metrics of what a peer keeps and carries, for itself and for others: checkpoints, an archive, circuits."""

from __future__ import annotations

from peers.telemetry.metric_kinds import Declare, Label
from peers.telemetry.reasons import ARCHIVING, RELAYING


class Checkpoints:
    """What a worker writes."""

    def __init__(self, declare: Declare) -> None:
        self.saved = declare.gauge(
            "checkpoint_last_success_timestamp_seconds",
            "When the newest checkpoint was written, Unix time in seconds.",
        )
        self.interval = declare.gauge(
            "checkpoint_interval_seconds",
            "Seconds between two checkpoints, as the peer file asks; 0: only when leaving, or none.",
        )
        self.disk_free = declare.gauge(
            "disk_free_bytes", "Bytes free on the disk of this peer's state folder."
        )


class Archive:
    """What an archivist keeps. Its series are of the stages of a run, and appear with `show`."""

    def __init__(self, declare: Declare) -> None:
        stage = Label("stage")
        self.round = declare.gauges(
            "archive_round", "Newest archived round, number, by the archive's index; -1: none.", stage
        )
        self.succeeded = declare.gauges(
            "archive_last_success_timestamp_seconds",
            "When a look at the peers of the stage last succeeded, Unix time in seconds: a newer checkpoint "
            "was archived, or they offered none; 0: not yet.",
            stage,
        )
        self.bytes = declare.gauges(
            "archive_size_bytes", "Bytes of the checkpoints kept, by the archive's index.", stage
        )
        self.served = declare.counters(
            "archive_served_bytes_total",
            "Bytes of weights handed to the connections of newcomers that asked for them; also what broken "
            "ones lost.",
            stage,
        )
        self.failures = declare.counters(
            "archive_failures_total",
            "Looks after which the stage was not archived, by reason (docs/watching.md).",
            stage,
            Label("reason", tuple(ARCHIVING)),
        )
        self.interval = declare.gauge(
            "archive_interval_seconds",
            "Seconds between two looks at all stages, as the peer file asks.",
        )

    def show(self, stages: int) -> None:
        """All series of a run with so many stages."""
        gauges = (self.round, self.succeeded, self.bytes)
        for stage in map(str, range(stages)):
            for gauge in gauges:
                gauge(stage)
            self.served(stage)
            for reason in ARCHIVING:
                self.failures(stage, reason)


class Relay:
    """What a bootstrap carries between peers that cannot dial each other."""

    def __init__(self, declare: Declare) -> None:
        self.circuits = declare.gauge(
            "relay_circuits",
            "Circuits through this peer that are open now, or being opened.",
        )
        self.refused = declare.counters(
            "relay_refused_total",
            "Slots and circuits that others asked for here and did not get, by reason (docs/watching.md).",
            Label("reason", tuple(RELAYING)),
        )
        self.carried = declare.counter(
            "relay_carried_bytes_total", "Bytes carried through circuits, both ways together."
        )
