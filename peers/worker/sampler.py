"""Once a second, what a peer knows of itself becomes metrics, a status line and events.

Nothing that works waits for anything here: the parts keep plain counters and timings, and these are read.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from peers.data.epoch_text import coverage_of
from peers.network.neighbourhood import Neighbourhood
from peers.telemetry import events as noted
from peers.telemetry.console import Report, Status
from peers.telemetry.counters import CODED, OBSERVE_SECONDS, CodecCounts, Growth, by_code
from peers.telemetry.event_log import EventLog
from peers.telemetry.metric_kinds import only
from peers.telemetry.metrics import COMPUTE_PHASES, PHASES, SHOWN_EXPERTS, STATES, Metrics
from peers.telemetry.reasons import DEPARTURES, DROPS, REQUESTS, REROUTES
from peers.telemetry.snapshot import SwarmSnapshot
from peers.worker.compute_sampler import ComputeTime, idle_reason
from peers.worker.rounds.receipts import summary
from peers.worker.rounds.update_path import UpdatePath
from peers.worker.snapshot_of_worker import ledger_event, snapshot_of
from peers.worker.worker import Worker
from swarmnet.model.experts.load import Routed, busiest_ratio, by_expert
from swarmnet.model.flops import operations_per_token
from swarmnet.optimizer.own_steps.held_experts import HeldExperts
from swarmnet.pipeline.ledger import Ledger
from swarmnet.rounds.phase import phase_of
from swarmnet.run.manifest import learning_rate
from swarmnet.run.rates import WHOLE, factor_of

NOTE_EVERY = 5
"""Every so many looks, ledger and traffic go to the event log too: a killed peer leaves them there."""
SPEED_SECONDS = 10.0
"""Tokens per second are an average over so long."""


PEER_STATES = {"training": "active", "joining": "joining", "suspect": "suspect"}
"""State of a neighbour in the snapshot -> in `swarmnet_peers`."""
BALANCE_SECONDS = 10.0
"""How even experts' loads were is told of so long: of a few microbatches, chance makes some busier."""


@dataclass(frozen=True, slots=True)
class _Routed:
    """What routers had chosen at some moment."""

    at: float
    of: Routed
    """Goes on counting."""
    then: Routed
    """As it was."""


class DirectoryBytes(Protocol):
    """Of DhtDirectory."""

    @property
    def sent_bytes(self) -> int: ...

    @property
    def received_bytes(self) -> int: ...


class Observer:
    """Reads a worker's counters."""

    def __init__(
        self,
        worker: Worker,
        metrics: Metrics,
        report: Report,
        log: EventLog,
        compute_time: ComputeTime | None = None,
        peak: float | None = None,
        directory: DirectoryBytes | None = None,
        name: str = "",
    ) -> None:
        """`compute_time`: of the process, which may have had workers before; `peak`: what its device can do
        by the peer file, operations per second; `directory`: what its part in that costs; `name`: of the peer
        file."""
        self.worker = worker
        self.metrics = metrics
        self.compute_time = compute_time if compute_time is not None else ComputeTime(metrics.compute)
        self.peak = peak
        self.directory = directory
        self.utilization: float | None = None
        """Of the peak, over the last seconds; None: not known."""
        self.report = report
        self.log = log
        self.name = name
        self.snapshot: SwarmSnapshot | None = None
        """The newest one, for `swarmnet top`."""
        self.ready = False
        self.growth = Growth()
        self._tokens: list[tuple[float, int]] = []
        self._update: UpdatePath | None = None
        self._saved_round: int | None = None
        self._inference_seconds = 0.0
        self._routed: _Routed | None = None
        step, microbatch = metrics.training.step_seconds, metrics.microbatches.duration
        self._durations = {
            **{phase: step(phase) for phase in COMPUTE_PHASES},
            "answered": microbatch("forward"),
            "handed up": microbatch("backward"),
            "round": metrics.rounds.duration,
            "round wait": metrics.rounds.wait,
            "staleness": metrics.training.staleness,
            **{
                f"{kind} {operation}": metrics.codecs.seconds(kind, operation)
                for kind in CODED
                for operation in ("encode", "decode")
            },
            "round trip": metrics.network.round_trip,
            **{operation: metrics.state.duration(operation) for operation in ("save", "load", "fetch")},
        }

    async def run(self) -> None:
        looks = 0
        self._account()
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            looks += 1
            self.look()
            if looks % NOTE_EVERY == 0:
                self.note()
            self.log.flush()

    def _account(self) -> None:
        self.compute_time.look(self.worker.loop.time(), self.worker.compute, idle_reason(self.worker))

    def note(self) -> None:
        """The counters as events; and what takes a few milliseconds to add up."""
        worker = self.worker
        if worker.neighbourhood is not None:
            traffic = worker.neighbourhood.traffic
            self.log.record(
                noted.Traffic(
                    sent=dict(traffic.sent),
                    received=dict(traffic.received),
                    refused=by_code(traffic.refused),
                    subflows=dict(worker.neighbourhood.transport.subflows),
                )
            )
            credit, metrics = summary(worker.receipts.kept), self.metrics.credit
            metrics.contributions.set(credit["accepted"])
            metrics.tokens.set(credit["tokens"])
            metrics.signers.set(credit["signers"])
        if worker.data is not None:
            self.log.record(ledger_event(worker.data.ledger))

    def look(self) -> None:
        """Update the metrics and the status line."""
        worker, metrics = self.worker, self.metrics
        metrics.about.stage.set(worker.stage)
        metrics.about.stages.set(len(worker.manifest.stages))
        only(metrics.about.state, STATES, worker.state)
        metrics.about.paused("owner").set(worker.orders.paused)
        self._machine(worker.settings.checkpoints)
        self._account()
        self.ready = worker.load().ready
        metrics.about.ready.set(self.ready)
        if worker.neighbourhood is not None and worker.data is not None:
            self._active(worker, worker.neighbourhood, worker.data.ledger)
        else:
            self.snapshot = snapshot_of(worker, self.name, idle_share=self.compute_time.idle_share)
            self.report.status(Status(
                worker.state, stage=worker.stage if worker.stage >= 0 else None,
                stages=len(worker.manifest.stages),
            ))  # fmt: skip

    def _active(self, worker: Worker, neighbourhood: Neighbourhood, ledger: Ledger) -> None:
        if self.directory is not None:  # Beside what messages cost: a line carries both.
            traffic = neighbourhood.traffic
            traffic.sent["directory"] = self.directory.sent_bytes
            traffic.received["directory"] = self.directory.received_bytes
        speed = self._speed(worker.loop.time(), ledger.tokens)
        if self.peak is not None and speed is not None:
            self.utilization = speed * operations_per_token(worker.manifest, worker.stage) / self.peak
            self.metrics.peak.set("train_flops_utilization_ratio", self.utilization)
        snapshot = self.snapshot = snapshot_of(
            worker, self.name, tokens_per_second=speed, idle_share=self.compute_time.idle_share,
            utilization=self.utilization,
        )  # fmt: skip
        self._shown(snapshot)
        self._network(neighbourhood)
        self._training(worker, ledger)
        self._experts(worker, worker.loop.time())
        self._rounds(worker)
        self._state(worker)
        self._inference(worker)
        self._timed(worker)
        group = [row for row in snapshot.rows if row.stage == worker.stage and not row.here]
        self.report.status(Status(
            snapshot.state,
            stage=worker.stage,
            stages=len(snapshot.stages),
            round=snapshot.round,
            loss=snapshot.loss,
            tokens_per_second=snapshot.tokens_per_second,
            sent_bytes=sum(snapshot.sent.values()),
            received_bytes=sum(snapshot.received.values()),
            group_peers=1 + sum(row.state == "training" for row in group),
            swarm_peers=len(snapshot.rows),
            tokens=snapshot.tokens,
            total_tokens=snapshot.settled_tokens,
            waits_for=_waits_for(worker, neighbourhood),
        ))  # fmt: skip

    def _shown(self, snapshot: SwarmSnapshot) -> None:
        """What `swarmnet top` shows, too."""
        rounds, growth = self.metrics.rounds, self.growth
        if snapshot.loss is not None:
            self.metrics.training.loss.set(snapshot.loss)
        if snapshot.round is not None and snapshot.settled is not None:
            rounds.round.set(snapshot.round)
            rounds.settled.set(snapshot.settled)
        rounds.lag.set(snapshot.lag or 0)
        self.metrics.counted.set("settled_tokens", snapshot.settled_tokens)
        for outcome, count in snapshot.microbatches.items():
            self.metrics.microbatches.ended(outcome).inc(growth.of("microbatches", count, outcome))
        states = Counter(PEER_STATES.get(row.state, "gone") for row in snapshot.rows if not row.here)
        for state in ("active", "joining", "suspect", "gone"):
            self.metrics.network.peers(state).set(states[state])

    def _speed(self, now: float, tokens: int) -> float | None:
        self._tokens = [(at, count) for at, count in self._tokens if at > now - SPEED_SECONDS]
        self._tokens.append((now, tokens))
        (first_at, first), (last_at, last) = self._tokens[0], self._tokens[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None

    def _network(self, neighbourhood: Neighbourhood) -> None:
        network, traffic, growth = self.metrics.network, neighbourhood.traffic, self.growth
        for kind, count in _of_messages(traffic.sent):
            network.sent(kind).inc(growth.of("sent", count, kind))
        for kind, count in _of_messages(traffic.received):
            network.received(kind).inc(growth.of("received", count, kind))
        for code, count in by_code(traffic.refused).items():
            network.refused(code).inc(growth.of("refused", count, code))
        subflows = neighbourhood.transport.subflows
        network.subflows.set(subflows.get("open", 0))
        network.messages_repeated.inc(growth.of("messages repeated", subflows.get("repeated", 0)))
        own = len(neighbourhood.membership.live(neighbourhood.membership.stage))
        network.group.set(own + self.ready)
        network.split.set(self.worker.looking.split.suspected)
        for reason, count in by_code(neighbourhood.departures, DEPARTURES).items():
            network.departures(reason).inc(growth.of("departures", count, reason))

    def _training(self, worker: Worker, ledger: Ledger) -> None:
        assert worker.data is not None
        training, microbatches, growth = self.metrics.training, self.metrics.microbatches, self.growth
        tokens = growth.of("tokens", ledger.tokens)
        training.tokens.inc(tokens)
        training.operations.inc(tokens * operations_per_token(worker.manifest, worker.stage))
        self._codecs(worker.data.work.codings)
        if (coverage := coverage_of(worker.data.text)) is not None:
            self.metrics.counted.set("text_shards", coverage.shards)
            self.metrics.counted.set("text_read_shards", coverage.shards_read)
            self.metrics.counted.set("text_epochs", coverage.epochs)
        losses = worker.data.losses
        if losses.mean is not None and losses.newest is not None:
            training.microbatch_loss.set(losses.newest)
        for reason, count in by_code(ledger.rerouted, REROUTES).items():
            microbatches.rerouted(reason).inc(growth.of("rerouted", count, reason))
        for reason, count in by_code(ledger.dropped, DROPS).items():
            microbatches.dropped(reason).inc(growth.of("dropped", count, reason))
        microbatches.missing.set(len(worker.data.missing))
        not_finite = ledger.dropped.get("not_finite", 0)
        training.nonfinite("microbatch").inc(growth.of("not finite", not_finite))
        training.scaled.inc(growth.of("scaled", worker.data.work.scaled))
        microbatches.queue.set(worker.compute.queued)
        microbatches.open.set(worker.data.pipeline.under_way)

    def _rounds(self, worker: Worker) -> None:
        update, metrics, growth = worker.update, self.metrics.rounds, self.growth
        only(metrics.phase, PHASES, phase_of(update.rounds) if update is not None else "none")
        if update is None:
            return
        if update is not self._update:
            self._update = update
            growth.forget("rounds", "applied", "corrections", "contributions not finite", "updates", "votes",
                          "encoded contribution", "made contribution")  # fmt: skip
        rounds, counts, training = update.rounds, update.counts, self.metrics.training
        self._codecs(counts.codings)
        for gauge, norm in zip((training.gradient_norm, training.momentum_norm), counts.norms, strict=True):
            if norm is not None:
                gauge.set(norm)
        for outcome, number in asdict(counts.votes).items():
            metrics.votes(outcome).inc(growth.of("votes", number, outcome))
        for ended, count in counts.ended.items():
            metrics.finished(ended).inc(growth.of("rounds", count, ended))
        if growth.of("applied", counts.ended.total()) > 0:
            training.last_step.set(time.time())
        if rounds.applied >= 0:
            factor = factor_of(rounds.rates, rounds.applied) / WHOLE
            training.learning_rate.set(factor * learning_rate(worker.manifest.sync, rounds.applied))
        self._holders(update.work.method.held)
        metrics.contributors.set(counts.contributors)
        metrics.corrections.inc(growth.of("corrections", counts.corrections))
        training.nonfinite("contribution").inc(growth.of("contributions not finite", counts.not_finite))
        for outcome, count in worker.audits.outcomes.items():
            metrics.audits(outcome).inc(growth.of("audits", count, outcome))
        for outcome, count in {**update.outcomes, "not_finite": counts.not_finite}.items():
            metrics.updates(outcome).inc(growth.of("updates", count, outcome))

    def _holders(self, held: HeldExperts | None) -> None:
        experts = self.metrics.experts
        experts.group.set(held.holding.group if held is not None else -1)
        experts.told.set("experts_least_holders", min(held.holding.holders) if held is not None else None)
        experts.told.set("experts_stale_rounds", max(held.holding.stale_rounds) if held is not None else None)

    def _experts(self, worker: Worker, now: float) -> None:
        """Where tokens went, and once in BALANCE_SECONDS how evenly."""
        routed = worker.part.compute.routed
        if not routed:
            return
        for expert, tokens in enumerate(by_expert(routed)):
            label = str(expert) if expert < SHOWN_EXPERTS else "other"
            self.metrics.experts.tokens(label).inc(self.growth.of("routed", tokens, str(expert)))
        if self._routed is None or self._routed.of is not routed or now >= self._routed.at + BALANCE_SECONDS:
            if self._routed is not None and self._routed.of is routed:
                ratio = busiest_ratio(routed, self._routed.then)
                self.metrics.experts.told.set("experts_busiest_ratio", ratio)
            self._routed = _Routed(now, routed, {layer: list(tokens) for layer, tokens in routed.items()})

    def _codecs(self, codings: CodecCounts) -> None:
        codecs, growth = self.metrics.codecs, self.growth
        for kind, count in codings.input_bytes.items():
            codecs.input(kind).inc(growth.of(f"encoded {kind}", count))
        for kind, count in codings.output_bytes.items():
            codecs.output(kind).inc(growth.of(f"made {kind}", count))

    def _state(self, worker: Worker) -> None:
        state, states, disk = self.metrics.state, worker.states, worker.disk
        settings = worker.settings
        state.interval.set(settings.checkpoint_seconds if settings.checkpoints is not None else 0.0)
        if states is not None:
            state.fetched.set(states.fetched_bytes)
            state.size.set(states.state_bytes)
            state.chunks_refused.inc(self.growth.of("chunks refused", states.chunks_refused))
        if disk.saved is not None and disk.saved[1] != self._saved_round:
            self._saved_round = disk.saved[1]
            state.saved.set(time.time())
            state.checkpoint_size.set(disk.saved_bytes)

    def _inference(self, worker: Worker) -> None:
        inference, metrics, growth = worker.inference, self.metrics.inference, self.growth
        for outcome, count in by_code(inference.outcomes, REQUESTS).items():
            metrics.requests(outcome).inc(growth.of("requests", count, outcome))
        metrics.seconds.inc(max(0.0, inference.seconds - self._inference_seconds))
        self._inference_seconds = inference.seconds

    def _machine(self, checkpoints: Path | None) -> None:
        """The disk that checkpoints go to."""
        if checkpoints is not None:
            with suppress(OSError):  # Not made yet.
                self.metrics.about.disk_free.set(shutil.disk_usage(checkpoints.parent).free)

    def _timed(self, worker: Worker) -> None:
        """Every duration that some part measured since the last look."""
        counts = worker.update.counts if worker.update is not None else None
        work = worker.data.work if worker.data is not None else None
        for part in (worker.neighbourhood, worker.data, work, counts, worker.states, worker.disk):
            for what, measured in part.timings.read() if part is not None else ():
                self._durations[what].observe(measured)


def _of_messages(counted: Mapping[str, int]) -> list[tuple[str, int]]:
    """By kind; the directory's are counted for the metrics where they arise (network/dht_sampler.py)."""
    return [(kind, count) for kind, count in counted.items() if kind != "directory"]


def _waits_for(worker: Worker, neighbourhood: Neighbourhood) -> int | None:
    """A stage below, else above, of which nobody is there and that cannot be left out."""
    if worker.state != "training" or worker.data is None:
        return None
    membership, missing = neighbourhood.membership, worker.data.ways.missing()
    if missing:
        return missing[0]
    above = [stage for stage in membership.beside if 0 <= stage < worker.stage]
    return worker.stage - 1 if above and not any(membership.live(stage) for stage in above) else None


