"""The swarm's metrics, as claimed by the records of its peers; made anew from the snapshot at every scrape.

The number of series is bounded: labels are the run, stages, fixed words, versions and the configured
bootstraps. No peer has a series of its own; the page lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from peers.telemetry import metrics
from peers.telemetry.metric_kinds import PREFIX, Declared, Label, table
from peers.telemetry.reasons import DEPARTURES
from peers.telemetry.snapshot import ROLES, STATES, SwarmSnapshot

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the number."""
RUN, STAGE = Label("run"), Label("stage")


@dataclass(frozen=True, slots=True)
class Shown:
    """One metric and where its numbers are in the snapshot."""

    declared: Declared
    samples: Callable[[SwarmSnapshot], Samples]


def _gauge(name: str, help: str, *labels: Label) -> Declared:
    return Declared(PREFIX + name, "gauge", (RUN, *labels), help)


def _known(number: float | None) -> Samples:
    """No series while nobody knows."""
    return [] if number is None else [((), float(number))]


def _least_holders(swarm: SwarmSnapshot) -> Samples:
    """By stage, where each peer trains one group of experts."""
    stages: dict[int, list[int]] = {}
    for group in swarm.experts:
        stages.setdefault(group.stage, []).append(group.holders)
    return [((str(stage),), min(holders)) for stage, holders in stages.items()]


SHOWN = (
    Shown(
        _gauge("swarm_peers",
               "Peers as claimed by records; gone: still in the directory, but it does not answer.",
               Label("role", ROLES), Label("state", STATES)),
        lambda swarm: [((role, state), count) for role, states in swarm.states.items()
                       for state, count in states.items()],
    ),
    Shown(
        _gauge("swarm_stage_peers", "Peers that hold a stage or are about to, as claimed by records.",
               STAGE),
        lambda swarm: [((str(stage.stage),), stage.peers) for stage in swarm.stages],
    ),
    Shown(
        _gauge("swarm_experts_min_replicas",
               "Holders of the stage's group of experts that the fewest peers train, as claimed by records.",
               STAGE),
        _least_holders,
    ),
    Shown(
        _gauge("swarm_round", "Round of the usual peer that trains, number, as claimed by records."),
        lambda swarm: _known(swarm.round),
    ),
    Shown(
        _gauge("swarm_loss", "Loss, nats per token: the median of what records claim."),
        lambda swarm: _known(swarm.loss),
    ),
    Shown(
        _gauge("swarm_eval_loss",
               "Loss on held-out text, nats per token: the median of what observers' records claim."),
        lambda swarm: _known(swarm.eval_loss),
    ),
    Shown(
        _gauge("swarm_finalized_tokens",
               "Tokens in all: in the settled rounds of the first stage, of the usual peer as claimed by "
               "records."),
        lambda swarm: _known(swarm.finalized_tokens),
    ),
    Shown(
        _gauge("swarm_tokens_per_second",
               "Tokens per second that were trained between the newest records, as claimed by them."),
        lambda swarm: _known(swarm.tokens_per_second),
    ),
    Shown(
        _gauge("swarm_checkpoint_timestamp_seconds",
               "When every stage had a checkpoint on some disk, Unix time in seconds, as claimed by them."),
        lambda swarm: _known(swarm.checkpoint.at if swarm.checkpoint else None),
    ),
    Shown(
        _gauge("swarm_held",
               "1 if the run's owner has paused it, by the newest order that the observer found; else 0."),
        lambda swarm: _known(swarm.ordered.held),
    ),
    Shown(
        _gauge("swarm_bootstrap_up", "1 if this bootstrap answers the observer, else 0.", Label("address")),
        lambda swarm: [((address,), up) for address, up in swarm.bootstraps.items()],
    ),
    Shown(
        Declared(PREFIX + "swarm_departures_total", "counter", (RUN, Label("reason", tuple(DEPARTURES))),
                 "Peers that have left since the observer began, as it has seen or as claimed by records."),
        lambda swarm: [((code,), swarm.departures.get(code, 0)) for code in DEPARTURES],
    ),
    Shown(
        _gauge("swarm_peer_versions", "Peers by version, as claimed by records; the rarest are `other`.",
               Label("version")),
        lambda swarm: [((version,), count) for version, count in swarm.versions],
    ),
    Shown(
        _gauge("swarm_last_walk_timestamp_seconds",
               "When the observer last read the whole directory, Unix time in seconds; 0: not yet."),
        lambda swarm: [((), swarm.walked_at)],
    ),
)  # fmt: skip


class SwarmMetrics(Collector):
    """A registry of its own."""

    def __init__(self, snapshot: Callable[[], SwarmSnapshot | None]) -> None:
        self._snapshot = snapshot
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Nothing can clash in a registry of one's own."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        swarm = self._snapshot()
        if swarm is None:
            return
        for shown in SHOWN:
            declared = shown.declared
            names = [label.name for label in declared.labels]
            kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
            family = kind(declared.name, declared.help, labels=names)
            for values, number in shown.samples(swarm):
                family.add_metric([swarm.run_id, *values], float(number))
            yield family

    def text(self) -> bytes:
        """What /metrics answers, in Prometheus' text format."""
        return generate_latest(self.registry)


def document() -> str:
    """docs/metrics.md: those of a peer, and below them these."""
    return "\n".join([
        metrics.document(),
        "## The swarm, from an observer",
        "",
        "An observer serves these at `/metrics` of its page, on 127.0.0.1:9420 unless its file differs",
        "([observer](observer.md)); what is its own as a peer, it serves as every peer does. From",
        "peers/observer/metrics.py.",
        "",
        *table(shown.declared for shown in SHOWN),
        "",
    ])  # fmt: skip
