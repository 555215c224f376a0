"""Every Prometheus metric of a peer, declared once. docs/metrics.md is made from these lines.

A peer id is never a label: Prometheus' `instance` is that. Labels with a fixed set of values have all
their series from the start, and a value outside the set is counted as `other`: whatever comes from the
network, the number of series is bounded. An update costs a dictionary look-up and an addition; the text
is made only when somebody scrapes. An instance belongs to one peer; nothing here is global.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from peers.telemetry.counters import CODED
from peers.telemetry.machine_metrics import EVALUATION, GPU, PEAK, ComputeSeconds
from peers.telemetry.metric_kinds import FAST, ROUNDS, SLOW, Declare, Declared, Label, Sometimes, only, table
from peers.telemetry.reasons import AUDITS, CONTRIBUTIONS, DEPARTURES, DROPS, REFUSALS, REQUESTS, REROUTES
from peers.telemetry.reasons import ROUNDS as ROUND_ENDS
from peers.telemetry.storage_metrics import Archive, Relay, State

KINDS = ("activation", "gradient", "experts", "contribution", "update", "audit", "snapshot", "inference",
         "control", "directory", "other")  # fmt: skip
"""What bytes are for: `Message.kind` in protocols/messages/table.py, and what the directory costs."""

WAYS = ("direct", "relayed", "none", "unknown")
"""How others get to a peer (`reachable.Way`)."""

PHASES = ("none", "catching_up", "gathering", "contributing", "waiting", "settling")
"""What rounds can be at (`rounds.phase.Phase`); none: this peer has no rounds now."""

COMPUTE_PHASES = ("forward", "backward", "last", "step", "encode", "reduce", "apply")
"""What a peer computes, as it takes the time of it."""

STATES = ("connecting", "joining", "training", "held", "ended", "paused", "leaving")
"""What a worker can be at (`Worker.state`)."""

PAUSES = ("user", "schedule", "idle", "battery", "owner", "other")
"""Who or what can pause a peer; owner: it keeps its stage and begins nothing new (creator/obedience.py)."""


COUNTED = {
    "settled_tokens":
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


class About:
    """Who this peer is."""

    def __init__(self, declare: Declare) -> None:
        self.build = declare.gauges(
            "build_info", "Always 1; the labels say what runs.",
            Label("version"), Label("python"), Label("torch"),
        )  # fmt: skip
        self.peer = declare.gauges(
            "peer_info", "Always 1; join with `* on(instance) group_left`.",
            Label("run"), Label("peer"), Label("role"), Label("device"),
        )  # fmt: skip
        self.stage = declare.gauge("stage", "Index of the stage held; -1: none.")
        self.stages = declare.gauge("stages", "Stages of the run.")
        self.ready = declare.gauge("ready", "1 if this peer takes part in rounds, else 0 (as /readyz).")
        self.state = declare.gauges(
            "state", "1 for what this worker is at, 0 for the others.", Label("state", STATES)
        )
        self.paused = declare.gauges(
            "paused", "1 while this peer is paused, by who or what paused it.", Label("reason", PAUSES)
        )
        self.moves = declare.counter(
            "stage_moves_total", "Moves of this peer to another stage, by its own decision."
        )
        self.disk_free = declare.gauge(
            "disk_free_bytes", "Bytes free on the disk of this peer's state folder."
        )
        self.loop_lag = declare.histogram(
            "event_loop_lag_seconds",
            "By how much the event loop was late, looked at once a second, seconds: answers wait so long.",
            FAST,
        )  # fmt: skip


class Training:
    """Computing."""

    def __init__(self, declare: Declare) -> None:
        self.tokens = declare.counter(
            "train_tokens_total", "Tokens since the start: whose gradient this process has committed."
        )
        self.loss = declare.gauge(
            "train_loss", "Loss, mean of the newest 100 microbatches that passed here, nats per token."
        )
        self.microbatch_loss = declare.gauge(
            "train_microbatch_loss", "Loss of the newest of them by itself, nats per token."
        )
        self.learning_rate = declare.gauge(
            "train_learning_rate", "Learning rate of the newest applied round."
        )
        self.operations = declare.counter(
            "train_floating_point_operations_total",
            "Floating-point operations of the model for the tokens committed here (swarmnet/model/flops.py).",
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
        self.staleness = declare.histogram(
            "train_staleness_rounds",
            "Rounds applied here between the forward pass of a microbatch and its gradient.", ROUNDS,
        )  # fmt: skip
        self.step_seconds = declare.histograms(
            "train_step_duration_seconds",
            "Computing by phase, seconds; last: forward, loss and backward at once, as the last stage does; "
            "step: a step of its own between rounds; encode: making a contribution; apply: what rounds do to "
            "the weights.", FAST,
            Label("phase", COMPUTE_PHASES),
        )  # fmt: skip
        self.last_step = declare.gauge(
            "train_last_step_timestamp_seconds", "When the newest round was applied, Unix time in seconds."
        )
        self.nonfinite = declare.counters(
            "train_nonfinite_total", "What was dropped because a number was not finite.",
            Label("where", ("microbatch", "contribution")),
        )  # fmt: skip
        self.scaled = declare.counter(
            "train_scaled_total",
            "Microbatches whose gradient from below was far larger than usual and was scaled down.",
        )


class Rounds:
    """Rounds and contributions."""

    def __init__(self, declare: Declare) -> None:
        self.round = declare.gauge("round", "Round that gradients are added to, number.")
        self.settled = declare.gauge("round_settled", "Newest settled round, number.")
        self.phase = declare.gauges(
            "round_phase",
            "1 for what the oldest round that is not applied here is at, looked at once a second, else 0; "
            "catching_up: the group has settled it before; gathering: it takes gradients; contributing: the "
            "own contribution is being made; waiting: for those of others; settling: it may not end before "
            "older ones have settled; none: no rounds here now.",
            Label("phase", PHASES),
        )  # fmt: skip
        only(self.phase, PHASES, "none")
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
        self.wait = declare.histogram(
            "round_wait_seconds",
            "From the closing of a round to its application: waiting for contributions of others, seconds. "
            "Computing goes on meanwhile.", SLOW,
        )  # fmt: skip
        self.contributors = declare.gauge("round_contributors", "Contributions in the newest applied round.")
        self.updates = declare.counters(
            "updates_total",
            "Contributions received, by outcome; not_finite and given_back: own ones (docs/watching.md).",
            Label("outcome", tuple(CONTRIBUTIONS)),
        )  # fmt: skip
        self.audits = declare.counters(
            "audits_total",
            "Shards of others' results, or windows of their work, looked into here (docs/watching.md).",
            Label("outcome", tuple(AUDITS)),
        )  # fmt: skip
        self.corrections = declare.counter(
            "round_corrections_total", "Late contributions that corrected an applied round."
        )
        self.votes = declare.counters(
            "votes_total",
            "Own votes in applied rounds; agreed: the others who voted on that coefficient mostly voted so, "
            "too; opposed: the other way; alone: nobody else voted on it, or the others are even. Noise is "
            "opposed as often as agreed with.",
            Label("outcome", ("agreed", "opposed", "alone")),
        )


EXPERTS = {
    "experts_least_holders":
        "Holders of the group of experts that the fewest peers of the stage train, in the newest applied "
        "round; 0: that group stays as it is. Only where each peer trains one group.",
    "experts_stale_rounds":
        "Rounds that have settled since the experts of the group that waits longest were trained, or since "
        "this peer was here. Only where each peer trains one group.",
    "experts_busiest_ratio":
        "Tokens of a layer's busiest expert over the mean of its experts, mean of the stage's layers, in the "
        "newest ten seconds; 1: even. Only where there are experts, computed on one device.",
}  # fmt: skip
SHOWN_EXPERTS = 128
"""Of a layer, those with a series: as many as most published mixtures have."""


class Experts:
    """Of a mixture."""

    def __init__(self, declare: Declare) -> None:
        self.group = declare.gauge(
            "experts_group",
            "Group of experts that this peer trains, number; -1: all of the stage, or there are none.",
        )
        self.tokens = declare.counters(
            "experts_tokens_total",
            "Tokens that the routers of this stage's layers sent to each expert, of those trained on here; "
            f"from number {SHOWN_EXPERTS} on: other. Only where there are experts, computed on one device.",
            Label("expert"),
        )
        self.told = Sometimes(declare, EXPERTS)


class Codecs:
    """Tensors and bytes."""

    def __init__(self, declare: Declare) -> None:
        kind = Label("kind", CODED)
        self.seconds = declare.histograms(
            "codec_duration_seconds",
            "Making bytes of a tensor, or a tensor of bytes, seconds; within train_step_duration_seconds.",
            FAST, kind, Label("operation", ("encode", "decode")),
        )  # fmt: skip
        self.input = declare.counters(
            "codec_input_bytes_total", "Bytes that were encoded here, as float32.", kind
        )
        self.output = declare.counters("codec_output_bytes_total", "Bytes that became of them.", kind)


class Microbatches:
    """The data path."""

    def __init__(self, declare: Declare) -> None:
        self.ended = declare.counters(
            "microbatches_total",
            "What became of microbatches here; rerouted: sent to another peer of the next stage; "
            "repeated: asked again after it was committed; refused: no slot was free; "
            "late_answers: gradients that were no longer needed.",
            Label("outcome", ("committed", "rerouted", "repeated", "dropped", "cancelled", "refused",
                              "late_answers")),
        )  # fmt: skip
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
        self.queue = declare.gauge("compute_queue_tasks", "Pieces of work that wait for the compute thread.")
        self.open = declare.gauge("stage_open_microbatches", "Microbatches begun here and not committed.")


class Network:
    """Bytes, connections, refusals."""

    def __init__(self, declare: Declare) -> None:
        kind = Label("kind", KINDS)
        self.sent = declare.counters(
            "network_sent_bytes_total", "Bytes sent, framing included, by what they are for.", kind
        )
        self.received = declare.counters(
            "network_received_bytes_total",
            "Bytes received, framing included, by what they are for; directory: the DHT's own.",
            kind,
        )
        self.round_trip = declare.histogram(
            "network_round_trip_seconds", "Round trip to neighbours as heartbeats measure it, seconds.", FAST
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
        self.nodes = declare.gauge("dht_nodes", "Nodes in this peer's routing table of the directory.")
        self.directory = declare.counters(
            "dht_operations_total",
            "Operations of the directory; empty: nothing found, or nobody stored it; failed: no answer.",
            Label("operation", ("get", "put", "bootstrap")), Label("outcome", ("ok", "empty", "failed")),
        )  # fmt: skip
        self.directory_seconds = declare.histograms(
            "dht_operation_duration_seconds", "Operations of the directory, failed ones too, seconds.", SLOW,
            Label("operation", ("get", "put", "bootstrap")),
        )  # fmt: skip
        self.split = declare.gauge(
            "dht_split_suspected",
            "1 while the directory does not return half or more of the peers that are linked here, else 0.",
        )
        self.bootstraps_lost = declare.gauge(
            "dht_bootstraps_lost",
            "1 while no bootstrap is in the directory's routing table or answers, else 0.",
        )
        self._declare_connections(declare)

    def _declare_connections(self, declare: Declare) -> None:
        self.connections = declare.gauges(
            "network_connections",
            "libp2p connections of this peer; relayed: they go through another peer.",
            Label("path", ("direct", "relayed")),
        )
        self.reachable = declare.gauges(
            "network_reachable",
            "1 for how others get to this peer, else 0; direct: somebody who was asked to dial back got in; "
            "relayed: nobody did, but a relay leads here; none: nobody did; unknown: nobody could tell.",
            Label("way", WAYS),
        )  # fmt: skip
        only(self.reachable, WAYS, "unknown")
        self.subflows = declare.gauge(
            "network_subflows",
            "Connections besides libp2p's own over which slow links send; they end with their links.",
        )
        self.messages_repeated = declare.counter(
            "network_messages_repeated_total", "Messages sent once more because such a connection broke."
        )
        self.daemon_restarts = declare.counter("daemon_restarts_total", "Restarts of p2pd after it died.")


class Inference:
    """What visitors ask for."""

    def __init__(self, declare: Declare) -> None:
        self.requests = declare.counters(
            "inference_requests_total", "Requests of visitors, by what became of them.",
            Label("outcome", (*REQUESTS, "other")),
        )  # fmt: skip
        self.seconds = declare.counter("inference_compute_seconds_total", "Computing for visitors, seconds.")


class Credit:
    """What others have signed for, by the receipts on this peer's disk (`swarmnet me`)."""

    def __init__(self, declare: Declare) -> None:
        self.contributions = declare.gauge(
            "credit_contributions", "Own contributions that others have signed receipts for."
        )
        self.tokens = declare.gauge(
            "credit_tokens", "Tokens in those, by this peer's own count; of the stages and rounds still kept."
        )
        self.signers = declare.gauge("credit_peers", "Peers that have signed one of the receipts kept.")


class Metrics:
    """All metrics of one peer. `process=False` leaves out what prometheus-client knows of the process."""

    def __init__(self, process: bool = True) -> None:
        # A `_created` series beside each counter doubles the text and no query here wants it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        declare = self._declare = Declare(self.registry)
        self.about = About(declare)
        self.training = Training(declare)
        self.rounds = Rounds(declare)
        self.experts = Experts(declare)
        self.codecs = Codecs(declare)
        self.compute = ComputeSeconds(declare)
        self.microbatches = Microbatches(declare)
        self.network = Network(declare)
        self.state = State(declare)
        self.archive = Archive(declare)
        self.relay = Relay(declare)
        self.inference = Inference(declare)
        self.credit = Credit(declare)
        self.gpu = Sometimes(declare, GPU)
        self.peak = Sometimes(declare, PEAK)
        self.counted = Sometimes(declare, COUNTED)
        self.evaluation = Sometimes(declare, EVALUATION)
        if process:
            ProcessCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    @property
    def declared(self) -> tuple[Declared, ...]:
        """All that this registry has of its own."""
        return tuple(self._declare.declared)

    def show_all(self) -> None:
        """Also what appears only where it can be told, for the documentation."""
        self.gpu.show()
        self.peak.show()
        self.counted.show()
        self.experts.told.show()
        self.evaluation.show()

    def text(self) -> bytes:
        """What /metrics answers, in Prometheus' text format."""
        return generate_latest(self.registry)


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
    ]
    metrics = Metrics(process=False)
    metrics.show_all()
    return "\n".join([*lines, *table(metrics.declared)]) + "\n"
