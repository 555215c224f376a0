"""Once a second, turn the counters of a worker into metrics, a status line and events.

Working code never waits for this: the parts keep plain counters and timings, which are read here.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from peers.telemetry import log_events
from peers.telemetry.console import Reporter, StatusLine
from peers.telemetry.counters import OBSERVE_SECONDS, Growth, by_code
from peers.telemetry.event_log import EventLog
from peers.telemetry.metric_kinds import only
from peers.telemetry.metrics import STATES, PeerMetrics
from peers.telemetry.reasons import DEPARTURES, DROPS, REQUESTS, REROUTES
from peers.telemetry.snapshot import SwarmSnapshot
from peers.worker.pipeline.document_reader import privacy_of
from peers.worker.pipeline.text_reader import coverage_of
from peers.worker.rounds.receipt_service import confirmed_tokens, summary
from peers.worker.rounds.round_service import RoundService
from peers.worker.stage_services import StageServices
from peers.worker.watch.compute_sampler import ComputeTime, idle_reason
from peers.worker.watch.snapshot_of_worker import ledger_event, snapshot_of
from peers.worker.worker import Worker
from protocols.dht.directory import DhtDirectory
from swarmnet.model.experts.load import Routed, busiest_ratio
from swarmnet.model.flops import operations_per_token
from swarmnet.pipeline.ledger import MicrobatchLedger
from swarmnet.run.manifest import learning_rate
from swarmnet.run.progress import RoundPace, planned_rounds
from swarmnet.run.rates import WHOLE, factor_of

NOTE_EVERY = 5
"""Every this many samples, ledger and traffic are also logged, so that a killed peer leaves them behind."""
SPEED_SECONDS = 10.0
"""Tokens per second are averaged over this window."""


PEER_STATES = {"training": "active", "joining": "joining", "suspect": "suspect"}
"""State of a neighbour in the snapshot -> its label in `swarmnet_peers`."""
BALANCE_SECONDS = 10.0
"""Window for the load imbalance of experts; over a few microbatches chance alone makes some busier."""


class WorkerSampler:
    """Samples one worker's counters."""

    def __init__(
        self,
        *,
        worker: Worker,
        metrics: PeerMetrics,
        report: Reporter,
        log: EventLog,
        compute_time: ComputeTime | None = None,
        count_totals: Callable[[float, bool, int], None] = lambda _now, _trains, _traffic_bytes: None,
        peak: float | None = None,
        directory: DhtDirectory | None = None,
        name: str = "",
    ) -> None:
        """`compute_time` belongs to the process, which may have had other workers before. `count_totals`
        gets the time of each sample, whether this peer trains, and its traffic in bytes. `peak` is the
        device's peak FLOP/s from the peer file. `directory` counts this peer's DHT traffic. `name` is the
        name in the peer file."""
        self.worker = worker
        self._loop = asyncio.get_running_loop()
        self.metrics = metrics
        self.compute_time = compute_time if compute_time is not None else ComputeTime(metrics.compute)
        self.count_totals = count_totals
        self.peak = peak
        self.directory = directory
        self.utilization: float | None = None
        """Model FLOPs utilization over the last seconds; None if not known."""
        self.report = report
        self.log = log
        self.name = name
        self.snapshot: SwarmSnapshot | None = None
        """The newest snapshot, for `swarmnet top`."""
        self.ready = False
        self.growth = Growth()
        self._tokens: list[tuple[float, int]] = []
        self._round_service: RoundService | None = None
        self._pace = RoundPace()
        self._saved_round: int | None = None
        self._routed: tuple[float, Routed, Routed] | None = None
        """Tokens routed to each expert at an earlier sample: time, the live counter, and a copy of it."""
        self._durations = {
            "answered": metrics.microbatches.duration("forward"),
            "handed up": metrics.microbatches.duration("backward"),
            "round": metrics.rounds.duration,
            "round trip": metrics.neighbours.round_trip,
        }

    async def run(self) -> None:
        samples = 0
        self._account()
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            samples += 1
            self.look()
            if samples % NOTE_EVERY == 0:
                self.log_event()
            self.log.flush()

    def _account(self) -> None:
        services = self.worker.services
        traffic = services.links.traffic if services is not None else None
        traffic_bytes = traffic.sent.total() + traffic.received.total() if traffic is not None else 0
        self.count_totals(self._loop.time(), self.worker.state == "training", traffic_bytes)
        self.compute_time.look(self._loop.time(), self.worker.context.compute, idle_reason(self.worker))

    def log_event(self) -> None:
        """Log the counters as events, and update metrics that take a few milliseconds to compute."""
        services = self.worker.services
        if services is None:
            return
        traffic = services.links.traffic
        self.log.record(
            log_events.Traffic(
                sent=dict(traffic.sent),
                received=dict(traffic.received),
                refused=by_code(traffic.refused),
                subflows=dict(services.links.transport.subflows),
            )
        )
        self.metrics.rounds.credit.set(summary(services.receipts.kept)["accepted"])
        self.log.record(ledger_event(services.pipeline_service.ledger))

    def look(self) -> None:
        """Update the metrics and the status line."""
        worker, metrics, services = self.worker, self.metrics, self.worker.services
        metrics.training.stage.set(worker.stage)
        only(metrics.training.state, STATES, worker.state)
        self._machine(worker.context.settings.checkpoints)
        self._account()
        if services is not None:
            self.ready = services.load(worker.served.moving_to).ready
            self._active(worker, services)
        else:
            self.snapshot = snapshot_of(worker, self.name, idle_share=self.compute_time.idle_share)
            self.report.status(
                StatusLine(
                    worker.state,
                    stage=worker.stage if worker.stage >= 0 else None,
                    stages=len(worker.context.manifest.stages),
                )
            )

    def _active(self, worker: Worker, services: StageServices) -> None:
        """Update the metrics, the snapshot for `top` and the status line of a worker that has links."""
        if self.directory is not None:  # Added to the message traffic: the link carries both.
            traffic = services.links.traffic
            traffic.sent["directory"] = self.directory.sent_bytes
            traffic.received["directory"] = self.directory.received_bytes
        now, ledger = self._loop.time(), services.pipeline_service.ledger
        speed = self._speed(now, ledger.tokens)
        if self.peak is not None and speed is not None:
            operations = operations_per_token(services.context.manifest, services.stage)
            self.utilization = speed * operations / self.peak
            self.metrics.peak.set("train_flops_utilization_ratio", self.utilization)
        snapshot = snapshot_of(
            worker,
            self.name,
            tokens_per_second=speed,
            idle_share=self.compute_time.idle_share,
            utilization=self.utilization,
        )
        self._pace.add(now, snapshot.round)
        planned = planned_rounds(services.context.manifest.sync, worker.orders.last_round)
        does_train = snapshot.state == "training" and not snapshot.waits_for
        left = self._pace.seconds_left(now, planned) if does_train else None
        snapshot = replace(snapshot, planned=planned, seconds_left=left)
        self.snapshot = snapshot
        self._shown(snapshot)
        self._network(services)
        self._training(services, ledger)
        self._experts(services, now)
        self._rounds(services)
        self._state(services)
        self._inference(services)
        self._timed(services)
        group = [row for row in snapshot.rows if row.stage == services.stage and not row.here]
        self.report.status(
            StatusLine(
                snapshot.state,
                stage=services.stage,
                stages=len(snapshot.stages),
                round=snapshot.round,
                loss=snapshot.loss,
                tokens_per_second=snapshot.tokens_per_second,
                sent_bytes=sum(snapshot.sent.values()),
                received_bytes=sum(snapshot.received.values()),
                group_peers=1 + sum(row.state == "training" for row in group),
                swarm_peers=len(snapshot.rows),
                tokens=snapshot.tokens,
                confirmed_tokens=confirmed_tokens(services.receipts.kept),
                total_tokens=snapshot.finalized_tokens,
                waits_for=_waits_for(services),
            )
        )

    def _shown(self, snapshot: SwarmSnapshot) -> None:
        """Update the metrics whose values `swarmnet top` shows as well."""
        rounds, growth = self.metrics.rounds, self.growth
        self.metrics.training.known.set("train_loss", snapshot.loss)
        if snapshot.round is not None and snapshot.settled is not None:
            rounds.round.set(snapshot.round)
            rounds.settled.set(snapshot.settled)
        rounds.lag.set(snapshot.lag or 0)
        self.metrics.counted.set("finalized_tokens", snapshot.finalized_tokens)
        self.metrics.counted.set("run_planned_rounds", snapshot.planned)
        self.metrics.counted.set("run_remaining_seconds", snapshot.seconds_left)
        microbatches = self.metrics.microbatches
        for outcome in ("committed", "repeated", "refused", "late_answers"):
            count = snapshot.microbatches[outcome]
            microbatches.ended(outcome).inc(growth.of("microbatches", count, outcome))
        states = Counter(PEER_STATES.get(row.state, "gone") for row in snapshot.rows if not row.here)
        for state in ("active", "joining", "suspect", "gone"):
            self.metrics.neighbours.peers(state).set(states[state])

    def _speed(self, now: float, tokens: int) -> float | None:
        self._tokens = [(at, count) for at, count in self._tokens if at > now - SPEED_SECONDS]
        self._tokens.append((now, tokens))
        (first_at, first), (last_at, last) = self._tokens[0], self._tokens[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None

    def _network(self, services: StageServices) -> None:
        network, neighbours = self.metrics.network, self.metrics.neighbours
        links, traffic, growth = services.links, services.links.traffic, self.growth
        for kind, count in _of_messages(traffic.sent):
            network.sent(kind).inc(growth.of("sent", count, kind))
        for kind, count in _of_messages(traffic.received):
            network.received(kind).inc(growth.of("received", count, kind))
        for code, count in by_code(traffic.refused).items():
            network.refused(code).inc(growth.of("refused", count, code))
        own = len(links.membership.live(services.stage))
        neighbours.group.set(own + self.ready)
        neighbours.split.set(services.looking.split.suspected)
        for reason, count in by_code(traffic.departures, DEPARTURES).items():
            neighbours.departures(reason).inc(growth.of("departures", count, reason))

    def _training(self, services: StageServices, ledger: MicrobatchLedger) -> None:
        training, microbatches, growth = self.metrics.training, self.metrics.microbatches, self.growth
        tokens = growth.of("tokens", ledger.tokens)
        training.tokens.inc(tokens)
        if (coverage := coverage_of(services.pipeline_service.origin.text)) is not None:
            self.metrics.counted.set("text_shards", coverage.shards)
            self.metrics.counted.set("text_read_shards", coverage.shards_read)
            self.metrics.counted.set("text_epochs", coverage.epochs)
        if (spent := privacy_of(services.pipeline_service.origin.text)) is not None:
            self.metrics.counted.set("text_spent_epsilon", spent.epsilon)
        service = services.pipeline_service
        for outcome, count in service.checks.outcomes.items():
            microbatches.compared(outcome).inc(growth.of("comparisons", count, outcome))
        microbatches.avoided.set(len(service.pipeline.router.shunned(service.clock.time())))
        for reason, count in by_code(ledger.rerouted, REROUTES).items():
            microbatches.rerouted(reason).inc(growth.of("rerouted", count, reason))
        for reason, count in by_code(ledger.dropped, DROPS).items():
            microbatches.dropped(reason).inc(growth.of("dropped", count, reason))
        microbatches.missing.set(len(services.pipeline_service.missing.now))
        not_finite = ledger.dropped.get("not_finite", 0)
        training.nonfinite("microbatch").inc(growth.of("not finite", not_finite))

    def _rounds(self, services: StageServices) -> None:
        """Update the metrics of rounds. Counters grow by the difference to the previous call."""
        service, metrics, growth = services.round_service, self.metrics.rounds, self.growth
        if not service.has_weights:
            return
        if service is not self._round_service:
            self._round_service = service
            growth.forget("rounds", "applied", "contributions not finite", "updates", "votes")
        rounds, counts, training = service.rounds, service.counts, self.metrics.training
        for name, norm in zip(("train_gradient_norm", "train_momentum_norm"), counts.norms, strict=True):
            training.known.set(name, norm)
        for outcome, number in asdict(counts.votes).items():
            metrics.votes(outcome).inc(growth.of("votes", number, outcome))
        for ended, count in counts.ended.items():
            metrics.finished(ended).inc(growth.of("rounds", count, ended))
        if growth.of("applied", counts.ended.total()) > 0:
            training.last_step.set(time.time())
        if rounds.applied >= 0:
            factor = factor_of(rounds.rates, rounds.applied) / WHOLE
            rate = factor * learning_rate(services.context.manifest.sync, rounds.applied)
            training.known.set("train_learning_rate", rate)
        training.nonfinite("contribution").inc(growth.of("contributions not finite", counts.not_finite))
        for outcome, count in services.audits.outcomes.items():
            metrics.audits(outcome).inc(growth.of("audits", count, outcome))
        for outcome, count in {**service.outcomes, "not_finite": counts.not_finite}.items():
            metrics.updates(outcome).inc(growth.of("updates", count, outcome))

    def _experts(self, services: StageServices, now: float) -> None:
        """Update the load imbalance of experts, once in BALANCE_SECONDS."""
        routed, before = services.part.compute.routed, self._routed
        if not routed or (before is not None and before[1] is routed and now < before[0] + BALANCE_SECONDS):
            return
        if before is not None and before[1] is routed:
            self.metrics.experts.set("expert_load_imbalance_ratio", busiest_ratio(routed, before[2]))
        self._routed = now, routed, {layer: list(tokens) for layer, tokens in routed.items()}

    def _state(self, services: StageServices) -> None:
        checkpoints, disk, settings = self.metrics.checkpoints, services.disk, services.context.settings
        checkpoints.interval.set(settings.checkpoint_seconds if settings.checkpoints is not None else 0.0)
        if disk.saved is not None and disk.saved[1] != self._saved_round:
            self._saved_round = disk.saved[1]
            checkpoints.saved.set(time.time())

    def _inference(self, services: StageServices) -> None:
        for outcome, count in by_code(services.inference.outcomes, REQUESTS).items():
            self.metrics.microbatches.requests(outcome).inc(self.growth.of("requests", count, outcome))

    def _machine(self, checkpoints: Path | None) -> None:
        """Update the free space on the checkpoints' disk."""
        if checkpoints is not None:
            with suppress(OSError):  # The folder does not exist yet.
                self.metrics.checkpoints.disk_free.set(shutil.disk_usage(checkpoints.parent).free)

    def _timed(self, services: StageServices) -> None:
        """Record every duration that a service has measured since the last sample."""
        for service in (services.links, services.pipeline_service, services.round_service.counts):
            for what, measured in service.timings.read():
                self._durations[what].observe(measured)


def _of_messages(counted: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return message traffic by kind. DHT traffic is left out: network/dht_sampler.py counts it."""
    return [(kind, count) for kind, count in counted.items() if kind != "directory"]


def _waits_for(services: StageServices) -> int | None:
    """Return a stage that microbatches wait for, a later one, else the previous one, else None."""
    if services.lifecycle.state != "training":
        return None
    membership, missing = services.links.membership, services.pipeline_service.ways.missing()
    if missing:
        return missing[0]
    above = [stage for stage in membership.beside if 0 <= stage < services.stage]
    return services.stage - 1 if above and not any(membership.live(stage) for stage in above) else None
