"""Metrics of the whole swarm, from the records' claims; generated from the snapshot at every scrape.

The number of series is bounded. Labels are the run, stages, fixed words, versions and the configured
bootstraps. No peer has series of its own; the page lists the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from peers.stageless.observer.judged_peers import LOW_WEIGHT
from peers.telemetry import metrics
from peers.telemetry.metric_kinds import PREFIX, Declared, Label, table
from peers.telemetry.reasons import DEPARTURES
from peers.telemetry.snapshot import ROLES, STATES, PeerRow, SwarmSnapshot

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Label values and the number."""
RUN, STAGE = Label("run"), Label("stage")


@dataclass(frozen=True, slots=True)
class SwarmMetric:
    """One metric and where its values are in the snapshot."""

    declared: Declared
    samples: Callable[[SwarmSnapshot], Samples]


def _gauge(name: str, help: str, *labels: Label) -> Declared:
    return Declared(PREFIX + name, "gauge", (RUN, *labels), help)


def _known(number: float | None) -> Samples:
    """Return one sample, or none while the number is unknown."""
    return [] if number is None else [((), float(number))]


def _min_holders(swarm: SwarmSnapshot) -> Samples:
    """Return the smallest number of peers per expert group, by stage."""
    stages: dict[int, list[int]] = {}
    for group in swarm.experts:
        stages.setdefault(group.stage, []).append(group.holders)
    return [((str(stage),), min(holders)) for stage, holders in stages.items()]


def _by_stage(swarm: SwarmSnapshot, total: Callable[[list[PeerRow]], float]) -> Samples:
    """Return a number of each stage's present peers."""
    present = [row for row in swarm.rows if row.state != "gone"]
    return [
        ((str(stage.stage),), total([row for row in present if row.stage == stage.stage]))
        for stage in swarm.stages
    ]


def _count_light(rows: list[PeerRow]) -> int:
    """Return how many peers' votes weigh little although they are known."""
    known = [row.vote_weight for row in rows if row.vote_weight is not None and not row.is_new_voter]
    return sum(weight < LOW_WEIGHT for weight in known)


SHOWN = (
    SwarmMetric(
        _gauge(
            "swarm_peers",
            "Peers by records, bootstraps by responses; gone: not responding.",
            Label("role", ROLES),
            Label("state", STATES),
        ),
        lambda swarm: [
            ((role, state), count) for role, states in swarm.states.items() for state, count in states.items()
        ],
    ),
    SwarmMetric(
        _gauge("swarm_stage_peers", "Peers that serve a stage or are about to, by records.", STAGE),
        lambda swarm: [((str(stage.stage),), stage.peers) for stage in swarm.stages],
    ),
    SwarmMetric(
        _gauge(
            "swarm_experts_min_replicas",
            "Peers that train the stage's rarest group of experts, by records.",
            STAGE,
        ),
        _min_holders,
    ),
    SwarmMetric(
        _gauge("swarm_light_peers", "Known peers whose votes weigh less than half, by records.", STAGE),
        lambda swarm: _by_stage(swarm, _count_light),
    ),
    SwarmMetric(
        _gauge(
            "swarm_dissenting_peers",
            "Peers that report other weights of votes than most, for one round, by records.",
            STAGE,
        ),
        lambda swarm: [
            ((str(stage.stage),), swarm.weight_conflicts.get(stage.stage, 0)) for stage in swarm.stages
        ],
    ),
    SwarmMetric(
        _gauge(
            "swarm_avoiding_peers",
            "Neighbours that avoided one peer of the stage for its answers: the most, by records.",
            STAGE,
        ),
        lambda swarm: _by_stage(swarm, lambda rows: max((row.avoided_by for row in rows), default=0)),
    ),
    SwarmMetric(
        _gauge("swarm_round", "Round of the median training peer, number, by records."),
        lambda swarm: _known(swarm.round),
    ),
    SwarmMetric(
        _gauge(
            "swarm_planned_rounds",
            "Rounds that the run is planned to have: by the owner's order to end it, else its schedule.",
        ),
        lambda swarm: _known(swarm.planned),
    ),
    SwarmMetric(
        _gauge(
            "swarm_remaining_seconds",
            "Seconds until these rounds are done, at the pace of the last 10 minutes, by records.",
        ),
        lambda swarm: _known(swarm.seconds_left),
    ),
    SwarmMetric(
        _gauge("swarm_loss", "Loss, nats per token: median of the records."),
        lambda swarm: _known(swarm.loss),
    ),
    SwarmMetric(
        _gauge("swarm_eval_loss", "Loss on held-out text, nats per token: median of observers' records."),
        lambda swarm: _known(swarm.eval_loss),
    ),
    SwarmMetric(
        _gauge("swarm_finalized_tokens", "Tokens in all settled rounds of stage 0: median of the records."),
        lambda swarm: _known(swarm.finalized_tokens),
    ),
    SwarmMetric(
        _gauge("swarm_tokens_per_second", "Tokens per second between the newest records."),
        lambda swarm: _known(swarm.tokens_per_second),
    ),
    SwarmMetric(
        _gauge(
            "swarm_checkpoint_timestamp_seconds",
            "When every stage had a checkpoint on some disk, by records.",
        ),
        lambda swarm: _known(swarm.checkpoint.at if swarm.checkpoint else None),
    ),
    SwarmMetric(
        _gauge("swarm_held", "1 if the owner's newest order pauses the run, else 0."),
        lambda swarm: _known(swarm.ordered.held),
    ),
    SwarmMetric(
        _gauge(
            "swarm_bootstrap_up", "1 if this bootstrap responds to the observer, else 0.", Label("address")
        ),
        lambda swarm: [((address,), up) for address, up in swarm.bootstraps.items()],
    ),
    SwarmMetric(
        Declared(
            PREFIX + "swarm_departures_total",
            "counter",
            (RUN, Label("reason", tuple(DEPARTURES))),
            "Peers that left since the observer started.",
        ),
        lambda swarm: [((code,), swarm.departures.get(code, 0)) for code in DEPARTURES],
    ),
    SwarmMetric(
        _gauge(
            "swarm_peer_versions", "Peers by version, by records; the rarest are `other`.", Label("version")
        ),
        lambda swarm: [((version,), count) for version, count in swarm.versions],
    ),
    SwarmMetric(
        _gauge(
            "swarm_last_walk_timestamp_seconds", "When the observer last read the whole directory; 0: never."
        ),
        lambda swarm: [((), swarm.walked_at)],
    ),
)


class SwarmMetrics(Collector):
    """A Prometheus collector of the snapshot's values, with its own registry."""

    def __init__(self, snapshot: Callable[[], SwarmSnapshot | None]) -> None:
        self._snapshot = snapshot
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Return nothing: in its own registry no name can clash."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield every metric with its values in the newest snapshot; none before there is a snapshot."""
        swarm = self._snapshot()
        if swarm is None:
            return
        for metric in SHOWN:
            declared = metric.declared
            names = [label.name for label in declared.labels]
            kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
            family = kind(declared.name, declared.help, labels=names)
            for values, number in metric.samples(swarm):
                family.add_metric([swarm.run_id, *values], float(number))  # The first label is the run.
            yield family

    def text(self) -> bytes:
        """Return the response of /metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def document() -> str:
    """Return the text of docs/metrics.md: the metrics of a peer, then those of an observer."""
    return "\n".join(
        [
            metrics.document(),
            "## The swarm, from an observer",
            "",
            "An observer ([observer](observer.md)) serves these metrics at `/metrics` of its page, by",
            "default on 127.0.0.1:9420. It also serves its own metrics as a peer, like every other peer.",
            'They are declared in peers/stageless/observer/swarm_metrics.py. Values "by records" are',
            "claims of the peers.",
            "",
            *table(metric.declared for metric in SHOWN),
            "",
        ]
    )
