"""Metrics of what a peer keeps and carries, for itself and for others: checkpoints, an archive, circuits."""

from __future__ import annotations

from peers.telemetry.metric_kinds import SLOW, Declare, Label
from peers.telemetry.reasons import ARCHIVING, RELAYING


class State:
    """Snapshots and checkpoints."""

    def __init__(self, declare: Declare) -> None:
        self.fetched = declare.gauge("state_fetched_bytes", "Bytes fetched so far of the newest state.")
        self.size = declare.gauge("state_size_bytes", "Bytes of the settled weights of this stage.")
        self.chunks_refused = declare.counter(
            "state_chunks_refused_total", "Chunks of state whose hash was wrong; they are fetched again."
        )
        self.saved = declare.gauge(
            "checkpoint_last_success_timestamp_seconds",
            "When the newest checkpoint was written, Unix time in seconds.",
        )
        self.interval = declare.gauge(
            "checkpoint_interval_seconds",
            "Seconds between two checkpoints, as the peer file asks; 0: only when leaving, or none.",
        )
        self.checkpoint_size = declare.gauge("checkpoint_size_bytes", "Bytes of the newest checkpoint.")
        self.duration = declare.histograms(
            "checkpoint_duration_seconds", "Writing, reading or fetching a checkpoint, seconds.", SLOW,
            Label("operation", ("save", "load", "fetch")),
        )  # fmt: skip


class Archive:
    """What an archivist keeps and hands on. Its series are of the stages of a run, and appear with `show`:
    nobody else has them."""

    def __init__(self, declare: Declare) -> None:
        stage = Label("stage")
        self.round = declare.gauges(
            "archive_round", "Newest archived round, number, by the archive's index; -1: none.", stage
        )
        self.written = declare.gauges(
            "archive_newest_timestamp_seconds",
            "When the checkpoint of that round was archived, Unix time in seconds; 0: none.",
            stage,
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
        self.checkpoints = declare.gauges(
            "archive_checkpoints", "Checkpoints kept, by the archive's index.", stage
        )
        self.failures = declare.counters(
            "archive_failures_total",
            "Looks after which the stage was not archived, by reason (docs/watching.md).",
            stage,
            Label("reason", tuple(ARCHIVING)),
        )
        self.served = declare.counters(
            "archive_served_bytes_total",
            "Bytes of weights handed to the connections of newcomers that asked for them; also what broken "
            "ones lost.",
            stage,
        )
        self.interval = declare.gauge(
            "archive_interval_seconds",
            "Seconds between two looks at all stages, as an archivist's peer file asks; 0: it is none.",
        )

    def show(self, stages: int) -> None:
        """All series of a run with so many stages."""
        gauges = (self.round, self.written, self.succeeded, self.bytes, self.checkpoints)
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
            "Circuits through this peer that are open now, or being opened; only bootstraps carry any.",
        )
        self.refused = declare.counters(
            "relay_refused_total",
            "Slots and circuits that others asked for here and did not get, by reason (docs/watching.md).",
            Label("reason", tuple(RELAYING)),
        )
        self.carried = declare.counter(
            "relay_carried_bytes_total", "Bytes carried through circuits, both ways together."
        )
