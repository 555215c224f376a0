"""Every Prometheus metric of a peer, declared once. docs/metrics.md is made from these lines.

A role has only the series that it can move: the others are declared in a registry that nobody reads. A peer
id is never a label: Prometheus' `instance` is that. Labels with a fixed set of values have all their series
from the start, and a value outside the set is counted as `other`: whatever comes from the network, the number
of series is bounded. An update costs a dictionary look-up and an addition; the text is made only when
somebody scrapes. An instance belongs to one peer; nothing here is global.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from peers.telemetry.machine_metrics import EXPERTS, GPU, PEAK, ComputeSeconds
from peers.telemetry.metric_kinds import FAST, SLOW, Declare, Declared, Label, Sometimes, only, table
from peers.telemetry.reasons import AUDITS, CONTRIBUTIONS, DEPARTURES, DROPS, REFUSALS, REQUESTS, REROUTES
from peers.telemetry.reasons import ROUNDS as ROUND_ENDS
from peers.telemetry.storage_metrics import Archive, Checkpoints, Relay

KINDS = ("activation", "gradient", "experts", "contribution", "update", "audit", "snapshot", "inference",
         "control", "directory", "other")  # fmt: skip
"""What bytes are for: `Message.kind` in protocols/messages/table.py, and what the directory costs."""

WAYS = ("direct", "relayed", "none", "unknown")
"""How others get to a peer (`reachable.Way`)."""

STATES = ("connecting", "joining", "training", "paused_by_owner", "ended", "paused", "leaving")
"""What a worker can be at (`Worker.state`)."""

COUNTED = {
    "finalized_tokens":
        "Tokens in all: of all peers, in all settled rounds of the stage since the run began. Only where it "
        "is known.",
    "text_shards":
        "Shards of the run's text that this peer has. Only of the first stage, where text is read in epochs.",
    "text_read_shards":
        "Shards of it that were read to their end in this epoch. Only of the first stage, where text is read "
        "in epochs.",
    "text_epochs":
        "Epochs of it that were read to their end. Only of the first stage, where text is read in epochs.",
}  # fmt: skip
ROLES = {
    "worker": "A worker has these as well.",
    "archivist": "An archivist has these as well.",
    "bootstrap": "A bootstrap has these as well.",
}
"""Those with series of their own."""


class About:
    """Who this peer is."""

    def __init__(self, declare: Declare) -> None:
        self.peer = declare.gauges(
            "peer_info", "Always 1, once the run is known; the labels say who this is and what runs.",
            Label("run"), Label("peer"), Label("role"), Label("device"), Label("version"),
        )  # fmt: skip
        self.late = declare.counter(
            "event_loop_late_seconds_total",
            "By how much the event loop was late, looked at once a second, seconds: answers wait so long.",
        )


class Training:
    """Computing."""

    def __init__(self, declare: Declare) -> None:
        self.stage = declare.gauge("stage", "Index of the stage that this peer holds; -1: none.")
        self.state = declare.gauges(
            "state", "1 for the state that this peer is in, else 0.", Label("state", STATES)
        )
        self.tokens = declare.counter(
            "train_tokens_total", "Tokens since the start: whose gradient this process has committed."
        )
        self.loss = declare.gauge(
            "train_loss", "Loss, mean of the newest 100 microbatches that passed here, nats per token."
        )
        self.learning_rate = declare.gauge(
            "train_learning_rate", "Learning rate of the newest applied round."
        )
        self.gradient_norm = declare.gauge(
            "train_gradient_norm",
            "2-norm of this stage's mean gradient in the newest own contribution, before it is clipped; per "
            "token's nats.",
        )
        self.momentum_norm = declare.gauge(
            "train_momentum_norm",
            "2-norm of what own contributions have not sent yet (error feedback): it should level off.",
        )
        self.last_step = declare.gauge(
            "train_last_step_timestamp_seconds", "When the newest round was applied, Unix time in seconds."
        )
        self.nonfinite = declare.counters(
            "train_nonfinite_total", "What was dropped because a number was not finite.",
            Label("where", ("microbatch", "contribution")),
        )  # fmt: skip


class Rounds:
    """Rounds and contributions."""

    def __init__(self, declare: Declare) -> None:
        self.round = declare.gauge("round", "Round that gradients are added to, number.")
        self.settled = declare.gauge("round_settled", "Newest settled round, number.")
        self.lag = declare.gauge("round_lag", "Rounds behind the group's newest known round.")
        self.finished = declare.counters(
            "rounds_total",
            "Rounds applied here; completed: all expected contributions came; deadline: some came late; "
            "alone: no neighbour to wait for; replayed: the group had settled it before; "
            "empty: without contributions.",
            Label("outcome", tuple(ROUND_ENDS)),
        )  # fmt: skip
        self.duration = declare.histogram(
            "round_duration_seconds", "From the opening of a round to its application, seconds.", SLOW
        )
        self.updates = declare.counters(
            "updates_total",
            "Contributions received, by outcome; not_finite and given_back: own ones (docs/watching.md).",
            Label("outcome", tuple(CONTRIBUTIONS)),
        )  # fmt: skip
        self.audits = declare.counters(
            "audits_total",
            "Shards of others' results that were computed again here (docs/watching.md).",
            Label("outcome", tuple(AUDITS)),
        )  # fmt: skip
        self.votes = declare.counters(
            "votes_total",
            "Own votes in applied rounds; agreed: the others who voted on that coefficient mostly voted so, "
            "too; opposed: the other way; alone: nobody else voted on it, or the others are even. Noise is "
            "opposed as often as agreed with.",
            Label("outcome", ("agreed", "opposed", "alone")),
        )
        self.credit = declare.gauge(
            "credit_contributions",
            "Contributions of this peer that others have signed receipts for (`swarmnet credit`).",
        )


class Microbatches:
    """The data path."""

    def __init__(self, declare: Declare) -> None:
        self.ended = declare.counters(
            "microbatches_total",
            "What became of microbatches here; repeated: asked again after it was committed; refused: no "
            "slot was free; late_answers: gradients that were no longer needed.",
            Label("outcome", ("committed", "repeated", "refused", "late_answers")),
        )
        self.rerouted = declare.counters(
            "microbatches_rerouted_total", "Microbatches sent to another peer of the next stage, by reason.",
            Label("reason", tuple(REROUTES)),
        )  # fmt: skip
        self.dropped = declare.counters(
            "microbatches_dropped_total", "Microbatches given up here, by reason.",
            Label("reason", (*DROPS, "other")),
        )  # fmt: skip
        self.missing = declare.gauge(
            "stages_missing", "Stages without a live peer that microbatches here wait for."
        )
        self.duration = declare.histograms(
            "microbatch_duration_seconds",
            "Seconds, network included; forward: from sending it on to its gradient; "
            "backward: from its arrival to handing its gradient up.", SLOW,
            Label("direction", ("forward", "backward")),
        )  # fmt: skip
        self.requests = declare.counters(
            "inference_requests_total", "Requests of visitors, by what became of them.",
            Label("outcome", (*REQUESTS, "other")),
        )  # fmt: skip


class Neighbours:
    """Those that a worker is linked to."""

    def __init__(self, declare: Declare) -> None:
        self.peers = declare.gauges(
            "peers",
            "Peers of the run that this one knows; active: linked and in step; joining: linked, not in step; "
            "suspect: linked, but silent for more than 2 seconds; gone: known, not linked.",
            Label("state", ("active", "joining", "suspect", "gone")),
        )  # fmt: skip
        self.group = declare.gauge(
            "stage_peers", "Peers of the own stage that are linked and in step, this one included."
        )
        self.departures = declare.counters(
            "departures_total",
            "Neighbours that are gone, by reason.",
            Label("reason", (*DEPARTURES, "other")),
        )
        self.round_trip = declare.histogram(
            "network_round_trip_seconds", "Round trip to neighbours as heartbeats measure it, seconds.", FAST
        )
        self.split = declare.gauge(
            "dht_split_suspected",
            "1 while the directory does not return half or more of the peers that are linked here, else 0.",
        )


class Network:
    """Bytes, the directory, refusals."""

    def __init__(self, declare: Declare, kinds: tuple[str, ...]) -> None:
        """`kinds`: of bytes that the role counts."""
        kind = Label("kind", kinds)
        self.sent = declare.counters(
            "network_sent_bytes_total", "Bytes sent, framing included, by what they are for.", kind
        )
        self.received = declare.counters(
            "network_received_bytes_total",
            "Bytes received, framing included, by what they are for; directory: the DHT's own.",
            kind,
        )
        self.clock_offset = declare.gauge(
            "network_clock_offset_seconds",
            "The swarm's clock minus this machine's, as others last told the time, seconds; above 3, either "
            "way, this peer goes by the swarm's, above 300 not: then this clock must be set. 0 while nobody "
            "has told it.",
        )
        self.refused = declare.counters(
            "refused_total",
            "What came from others and was refused, by reason.",
            Label("code", tuple(REFUSALS)),
        )
        self.directory = declare.counters(
            "dht_operations_total",
            "Operations of the directory; empty: nothing found, or nobody stored it; failed: no answer.",
            Label("operation", ("get", "put", "bootstrap")), Label("outcome", ("ok", "empty", "failed")),
        )  # fmt: skip
        self.bootstraps_lost = declare.gauge(
            "dht_bootstraps_lost",
            "1 while no bootstrap is in the directory's routing table or answers, else 0.",
        )
        self.reachable = declare.gauges(
            "network_reachable",
            "1 for how others get to this peer, else 0; direct: somebody who was asked to dial back got in; "
            "relayed: nobody did, but a relay leads here; none: nobody did; unknown: nobody could tell.",
            Label("way", WAYS),
        )  # fmt: skip
        only(self.reachable, WAYS, "unknown")
        self.daemon_restarts = declare.counter("daemon_restarts_total", "Restarts of p2pd after it died.")


class Metrics:
    """All metrics of one peer. `process=False` leaves out what prometheus-client knows of the process."""

    def __init__(self, role: str = "worker", process: bool = True) -> None:
        # A `_created` series beside each counter doubles the text and no query here wants it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._role = role
        self._shared, self._own = Declare(self.registry), Declare(self.registry)
        self._unread = Declare(CollectorRegistry())
        self.about = About(self._shared)
        self.network = Network(self._shared, KINDS if role == "worker" else ("directory",))
        worker = self._of("worker")
        self.training = Training(worker)
        self.rounds = Rounds(worker)
        self.compute = ComputeSeconds(worker)
        self.microbatches = Microbatches(worker)
        self.neighbours = Neighbours(worker)
        self.checkpoints = Checkpoints(worker)
        self.gpu = Sometimes(worker, GPU)
        self.peak = Sometimes(worker, PEAK)
        self.counted = Sometimes(worker, COUNTED)
        self.experts = Sometimes(worker, EXPERTS)
        self.archive = Archive(self._of("archivist"))
        self.relay = Relay(self._of("bootstrap"))
        if process:
            ProcessCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def _of(self, role: str) -> Declare:
        return self._own if role == self._role else self._unread

    @property
    def shared(self) -> tuple[Declared, ...]:
        """What every role has."""
        return tuple(self._shared.declared)

    @property
    def own(self) -> tuple[Declared, ...]:
        """What this role has besides."""
        return tuple(self._own.declared)

    def show_all(self) -> None:
        """Also what appears only where it can be told, for the documentation."""
        self.gpu.show()
        self.peak.show()
        self.counted.show()
        self.experts.show()

    def text(self) -> bytes:
        """What /metrics answers, in Prometheus' text format."""
        return generate_latest(self.registry)


def of_role(role: str) -> Metrics:
    """All that a peer of this role can have."""
    metrics = Metrics(role, process=False)
    metrics.show_all()
    return metrics


def declared_metrics() -> tuple[Declared, ...]:
    """Of all roles, each once."""
    return (*of_role("worker").shared, *(metric for role in ROLES for metric in of_role(role).own))


def document() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made by `scripts/docs` from peers/telemetry/metrics.py, peers/telemetry/machine_metrics.py and",
        "peers/telemetry/storage_metrics.py; do not edit.",
        "",
        "A peer serves these at `/metrics`, on 127.0.0.1:9410 unless its file says otherwise, with the",
        "`process_*` and `python_gc_*` of prometheus-client beside them. Labels with a fixed set of values",
        "have all their series from the start; a value outside the set is counted as `other`. Of an",
        "archive's stages only its archivist has series, for each stage of the run from when the archive is",
        "open.",
        "",
        "## Every role",
        "",
        "A role that is no worker counts of the bytes only the directory's.",
        "",
        *table(of_role("worker").shared),
    ]
    for role, words in ROLES.items():
        lines += ["", f"## {role.capitalize()}", "", words, "", *table(of_role(role).own)]
    return "\n".join(lines) + "\n"
