"""Every Prometheus metric of a peer, declared once; docs/metrics.md is generated from it.

A role exports only the series that it updates; the others are declared in an unused registry. A peer id is
never a label, because Prometheus has `instance` for that. Every series has the label `run` once the run is
known. Labels with fixed values have all their series from the start, and any other value is counted as
`other`. The number of series is therefore bounded, whatever the
network sends. An update costs a dictionary look-up and an addition; the text is made only for a scrape. An
instance belongs to one peer; nothing here is global."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from peers.telemetry.machine_metrics import EXPERTS, GPU, PEAK, ComputeSeconds
from peers.telemetry.metric_kinds import (
    FAST,
    SLOW,
    Declare,
    Declared,
    Label,
    OptionalGauges,
    WithLabel,
    only,
    table,
)
from peers.telemetry.reasons import AUDITS, CONTRIBUTIONS, DEPARTURES, DROPS, REFUSALS, REQUESTS, REROUTES
from peers.telemetry.reasons import COMPARISONS as COMPARED
from peers.telemetry.reasons import ROUNDS as ROUND_ENDS
from peers.telemetry.storage_metrics import ArchiveMetrics, CheckpointMetrics, RelayMetrics

KINDS = ("activation", "gradient", "experts", "contribution", "update", "audit", "snapshot", "inference",
         "control", "directory", "other")  # fmt: skip
"""What bytes are used for: `Message.kind` in protocols/messages/table.py, and the directory's traffic."""

WAYS = ("direct", "relayed", "none", "unknown")
"""How other peers reach this one (`reachable.Way`)."""

STATES = ("connecting", "joining", "training", "paused_by_owner", "ended", "paused", "leaving")
"""States of a worker (`Worker.state`)."""

LEARNING = {
    "train_loss":
        "Loss, mean of the newest 100 microbatches here, nats per token.",
    "train_learning_rate":
        "Learning rate of the newest applied round.",
    "train_gradient_norm":
        "2-norm of the mean gradient in the newest own contribution, before clipping; nats per token.",
    "train_momentum_norm":
        "2-norm of the residual (error feedback); it should level off.",
}  # fmt: skip
"""Gauges of training, without a series before their first value."""
COUNTED = {
    "finalized_tokens":
        "Tokens of all peers in all settled rounds of the stage. Only if known.",
    "run_planned_rounds":
        "Rounds that the run is planned to have: by the owner's order to end it, else `sync.decay_rounds`.",
    "run_remaining_seconds":
        "Seconds until these rounds are done, at the pace of the last 10 minutes. Only if known.",
    "text_shards":
        "Shards of the run's text on this peer. Only stage 0 with `sampling: epoch`.",
    "text_read_shards":
        "Shards read to their end in this epoch. Only stage 0 with `sampling: epoch`.",
    "text_epochs":
        "Epochs completed. Only stage 0 with `sampling: epoch`.",
    "text_spent_epsilon":
        "Epsilon, the privacy loss of this peer's documents so far. Only with `data.privacy`.",
}  # fmt: skip
ROLES = {
    "worker": "Only a worker has these metrics.",
    "archivist": "Only an archivist has these metrics. A stage's series appear once the archive is open.",
    "bootstrap": "Only a bootstrap has these metrics.",
}
"""Roles with series of their own."""


class About:
    """The identity of this peer."""

    def __init__(self, declare: Declare) -> None:
        self.peer = declare.gauges(
            "peer_info", "Always 1 once the run is known; the labels identify the peer.",
            Label("peer"), Label("role"), Label("device"), Label("version"),
        )  # fmt: skip
        self.late = declare.counter(
            "event_loop_late_seconds_total",
            "Delay of the event loop in seconds, sampled once a second; responses wait as long.",
        )


class TrainingMetrics:
    """Training progress."""

    def __init__(self, declare: Declare) -> None:
        self.stage = declare.gauge("stage", "Index of the stage that this peer serves; -1: none.")
        self.state = declare.gauges("state", "1 for this peer's state, else 0.", Label("state", STATES))
        self.tokens = declare.counter(
            "train_tokens_total", "Tokens whose gradient this process has committed."
        )
        self.known = OptionalGauges(declare, LEARNING)
        self.last_step = declare.gauge(
            "train_last_step_timestamp_seconds", "Unix time of the newest applied round."
        )
        self.nonfinite = declare.counters(
            "train_nonfinite_total", "Dropped because a number was not finite.",
            Label("where", ("microbatch", "contribution")),
        )  # fmt: skip


class RoundMetrics:
    """Rounds and contributions."""

    def __init__(self, declare: Declare) -> None:
        self.round = declare.gauge("round", "Round that gradients are added to, number.")
        self.settled = declare.gauge("round_settled", "Newest settled round, number.")
        self.lag = declare.gauge("round_lag", "Rounds behind the group's newest known round.")
        self.finished = declare.counters(
            "rounds_total",
            "Rounds applied here, by outcome (docs/watching.md).",
            Label("outcome", tuple(ROUND_ENDS)),
        )  # fmt: skip
        self.duration = declare.histogram(
            "round_duration_seconds", "Seconds from the opening of a round to its application.", SLOW
        )
        self.updates = declare.counters(
            "updates_total",
            "Contributions by outcome (docs/watching.md); not_finite, contribution_returned: own ones.",
            Label("outcome", tuple(CONTRIBUTIONS)),
        )  # fmt: skip
        self.audits = declare.counters(
            "audits_total",
            "Shards of other peers' results audited here, by outcome (docs/watching.md).",
            Label("outcome", tuple(AUDITS)),
        )  # fmt: skip
        self.votes = declare.counters(
            "votes_total",
            "Own votes in applied rounds, compared with the majority of other votes on the coefficient; "
            "alone: no other vote, or a tie. Noise is opposed as often as agreed.",
            Label("outcome", ("agreed", "opposed", "alone")),
        )
        self.credit = declare.gauge(
            "credit_contributions",
            "Contributions with signed receipts (`swarmnet credit`).",
        )


class MicrobatchMetrics:
    """Microbatches in the pipeline."""

    def __init__(self, declare: Declare) -> None:
        self.ended = declare.counters(
            "microbatches_total",
            "Microbatches by outcome; repeated: sent again after it was committed; refused: no free slot; "
            "late_answers: gradients no longer needed.",
            Label("outcome", ("committed", "repeated", "refused", "late_answers")),
        )
        self.compared = declare.counters(
            "comparisons_total",
            "Microbatches whose answer was compared with a second peer's, by outcome (docs/watching.md).",
            Label("outcome", tuple(COMPARED)),
        )
        self.avoided = declare.gauge(
            "avoided_peers", "Peers that get no work because their values differ from those of others."
        )
        self.rerouted = declare.counters(
            "microbatches_rerouted_total", "Microbatches sent to another peer, by reason.",
            Label("reason", tuple(REROUTES)),
        )  # fmt: skip
        self.dropped = declare.counters(
            "microbatches_dropped_total", "Microbatches dropped here, by reason.",
            Label("reason", (*DROPS, "other")),
        )  # fmt: skip
        self.missing = declare.gauge(
            "stages_missing", "Stages without a live peer that microbatches wait for."
        )
        self.duration = declare.histograms(
            "microbatch_duration_seconds",
            "Seconds, network included; forward: from sending it to its gradient; "
            "backward: from its arrival to sending its gradient.", SLOW,
            Label("direction", ("forward", "backward")),
        )  # fmt: skip
        self.requests = declare.counters(
            "inference_requests_total", "Inference requests by outcome.",
            Label("outcome", (*REQUESTS, "other")),
        )  # fmt: skip


class NeighbourMetrics:
    """The peers that a worker is linked to."""

    def __init__(self, declare: Declare) -> None:
        self.peers = declare.gauges(
            "peers",
            "Known peers of the run; active: linked and in step; joining: linked, not in step; "
            "suspect: linked, silent for over 2 seconds; gone: not linked.",
            Label("state", ("active", "joining", "suspect", "gone")),
        )  # fmt: skip
        self.group = declare.gauge(
            "stage_peers", "Peers of the same stage, linked and in step, this one included."
        )
        self.departures = declare.counters(
            "departures_total",
            "Neighbours lost, by reason.",
            Label("reason", (*DEPARTURES, "other")),
        )
        self.round_trip = declare.histogram(
            "network_round_trip_seconds", "Round trip to neighbours in seconds, by heartbeats.", FAST
        )
        self.split = declare.gauge(
            "dht_split_suspected",
            "1 while the directory lacks at least half of the linked peers, else 0.",
        )


class NetworkMetrics:
    """Traffic, the directory and refusals."""

    def __init__(self, declare: Declare, kinds: tuple[str, ...]) -> None:
        """`kinds` are the kinds of bytes that the role counts."""
        kind = Label("kind", kinds)
        self.sent = declare.counters(
            "network_sent_bytes_total", "Bytes sent, with framing, by purpose.", kind
        )
        self.received = declare.counters(
            "network_received_bytes_total",
            "Bytes received, with framing, by purpose; directory: the DHT's own.",
            kind,
        )
        self.clock_offset = declare.gauge(
            "network_clock_offset_seconds",
            "Swarm's clock minus this machine's. Beyond 3 seconds this peer uses the swarm's clock; "
            "beyond 300 set the machine's clock. 0 while unknown.",
        )
        self.refused = declare.counters(
            "refused_total",
            "Messages and connections refused, by reason.",
            Label("code", tuple(REFUSALS)),
        )
        self.directory = declare.counters(
            "dht_operations_total",
            "DHT operations; empty: nothing found or stored; failed: no response.",
            Label("operation", ("get", "put", "bootstrap")), Label("outcome", ("ok", "empty", "failed")),
        )  # fmt: skip
        self.bootstraps_lost = declare.gauge(
            "dht_bootstraps_lost",
            "1 while no bootstrap is in the routing table or responds, else 0.",
        )
        self.reachable = declare.gauges(
            "network_reachable",
            "1 for how other peers reach this one, else 0; direct: a dial-back succeeded; relayed: only "
            "through a relay; none: not at all; unknown: not tested.",
            Label("way", WAYS),
        )  # fmt: skip
        only(self.reachable, WAYS, "unknown")
        self.daemon_restarts = declare.counter("daemon_restarts_total", "Restarts of p2pd after it died.")


class PeerMetrics:
    """All metrics of one peer. `process=False` leaves out prometheus-client's metrics of the process."""

    def __init__(self, role: str = "worker", process: bool = True) -> None:
        # A `_created` series for each counter doubles the text, and no query here uses it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.run = ""
        """Id of the run, a label of every series; empty: not known, or a bootstrap of no run."""
        self._role = role
        self._shared = Declare(self.registry)
        self._own = Declare(self.registry)
        self._unread = Declare(CollectorRegistry())
        self.about = About(self._shared)
        self.network = NetworkMetrics(self._shared, KINDS if role == "worker" else ("directory",))
        worker = self._registry_for("worker")
        self.training = TrainingMetrics(worker)
        self.rounds = RoundMetrics(worker)
        self.compute = ComputeSeconds(worker)
        self.microbatches = MicrobatchMetrics(worker)
        self.neighbours = NeighbourMetrics(worker)
        self.checkpoints = CheckpointMetrics(worker)
        self.gpu = OptionalGauges(worker, GPU)
        self.peak = OptionalGauges(worker, PEAK)
        self.counted = OptionalGauges(worker, COUNTED)
        self.experts = OptionalGauges(worker, EXPERTS)
        self.archive = ArchiveMetrics(self._registry_for("archivist"))
        self.relay = RelayMetrics(self._registry_for("bootstrap"))
        if process:
            ProcessCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def _registry_for(self, role: str) -> Declare:
        """Return the exported registry if this peer has the role, else the unused one."""
        return self._own if role == self._role else self._unread

    @property
    def shared(self) -> tuple[Declared, ...]:
        """Return the metrics of every role."""
        return tuple(self._shared.declared)

    @property
    def own(self) -> tuple[Declared, ...]:
        """Return the metrics of this role only."""
        return tuple(self._own.declared)

    def show_all(self) -> None:
        """Create also the series that appear only when their value is known, for the documentation."""
        self.training.known.show()
        self.gpu.show()
        self.peak.show()
        self.counted.show()
        self.experts.show()

    def text(self) -> bytes:
        """Return the response of /metrics in Prometheus' text format."""
        return generate_latest(WithLabel(self.registry, "run", self.run) if self.run else self.registry)


def of_role(role: str) -> PeerMetrics:
    """Return all metrics that a peer of this role can have."""
    metrics = PeerMetrics(role, process=False)
    metrics.show_all()
    return metrics


def declared_metrics() -> tuple[Declared, ...]:
    """Return the metrics of all roles, each once."""
    return (*of_role("worker").shared, *(metric for role in ROLES for metric in of_role(role).own))


def document() -> str:
    """Return the text of docs/metrics.md: metrics of every role, then of each role. The observer's part is
    missing."""
    lines = [
        "# Metrics",
        "",
        "`scripts/docs` generates this page from peers/telemetry/*metrics.py; do not edit it.",
        "",
        "A peer serves these metrics at `/metrics`, by default on 127.0.0.1:9410, together with",
        "prometheus-client's `process_*` and `python_gc_*`. Units are in the names. Timestamps are Unix time",
        "in seconds. All have the label `run`, the run's id, once the peer knows its run. Labels with listed",
        "values have all their series from the start; any other value is counted as `other`.",
        "[Watching](watching.md#codes) explains the codes.",
        "",
        "## Every role",
        "",
        "Every role has these metrics. Roles other than worker count only the bytes of kind `directory`.",
        "",
        *table(of_role("worker").shared),
    ]
    for role, note in ROLES.items():
        lines += ["", f"## {role.capitalize()}", "", note, "", *table(of_role(role).own)]
    return "\n".join(lines) + "\n"
