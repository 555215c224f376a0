"""Once a second, what a worker knows of itself becomes metrics, a status line and events."""

from __future__ import annotations

import asyncio
import time

from peers.event_log import EventLog
from peers.metrics import Metrics
from peers.status import Report, Status
from peers.worker import Worker
from swarmnet.ledger import Ledger

OBSERVE_SECONDS = 1.0
NOTE_EVERY = 5
"""Every so many looks, ledger and traffic go to the event log too: a killed peer leaves them there."""


class Observer:
    """Reads a worker's counters; nothing in the worker waits for it."""

    def __init__(self, worker: Worker, metrics: Metrics, report: Report, log: EventLog) -> None:
        self.worker = worker
        self.metrics = metrics
        self.report = report
        self.log = log
        self.ready = False
        self._tokens: list[tuple[float, int]] = []
        self._counted: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            looks += 1
            self.look()
            if looks % NOTE_EVERY == 0:
                self.note()
            self.log.flush()

    def note(self) -> None:
        """The counters as events."""
        worker = self.worker
        if worker.neighbourhood is not None:
            traffic = worker.neighbourhood.traffic
            self.log.record(
                "traffic",
                sent=dict(traffic.sent),
                received=dict(traffic.received),
                refused=dict(traffic.refused),
            )
        if worker.data is not None:
            self.log.record("ledger", **ledger_fields(worker.data.ledger))

    def look(self) -> None:
        """Update the metrics and the status line."""
        worker, metrics = self.worker, self.metrics
        metrics.about.stage.set(worker.stage)
        self.ready = worker.load().ready
        metrics.about.ready.set(self.ready)
        status = Status(worker.state, stage=worker.stage, stages=len(worker.manifest.stages))
        if worker.neighbourhood is not None and worker.data is not None:
            status = self._active(worker)
        self.report.status(status)

    def _active(self, worker: Worker) -> Status:
        assert worker.neighbourhood is not None
        assert worker.data is not None
        traffic, ledger = worker.neighbourhood.traffic, worker.data.ledger
        peers = worker.neighbourhood.membership.peers.values()
        self._network(worker)
        self._training(worker)
        linked = [known for known in peers if known.linked]
        now = time.monotonic()
        self._tokens = [(at, count) for at, count in self._tokens if at > now - 10.0]
        self._tokens.append((now, ledger.tokens))
        (first_at, first), (last_at, last) = self._tokens[0], self._tokens[-1]
        speed = (last - first) / (last_at - first_at) if last_at > first_at else None
        return Status(
            worker.state,
            stage=worker.stage,
            stages=len(worker.manifest.stages),
            round=worker.update.rounds.current if worker.update is not None else None,
            loss=worker.data.loss,
            tokens_per_second=speed,
            sent_bytes=traffic.sent.total(),
            received_bytes=traffic.received.total(),
            group_peers=1 + sum(known.stage == worker.stage and known.ready for known in linked),
            swarm_peers=1 + len(peers),
            tokens=ledger.tokens,
        )

    def _network(self, worker: Worker) -> None:
        assert worker.neighbourhood is not None
        network, neighbourhood = self.metrics.network, worker.neighbourhood
        for kind, count in neighbourhood.traffic.sent.items():
            network.sent(kind).inc(self._since("sent", kind, count))
        for kind, count in neighbourhood.traffic.received.items():
            network.received(kind).inc(self._since("received", kind, count))
        for code, count in neighbourhood.traffic.refused.items():
            network.refused(code).inc(self._since("refused", code, count))
        for seconds in neighbourhood.round_trips.values():
            network.round_trip.observe(seconds)
        known = list(neighbourhood.membership.peers.values())
        network.connections("unknown").set(sum(peer.linked for peer in known))
        network.peers("active").set(sum(peer.linked and peer.ready for peer in known))
        network.peers("joining").set(sum(peer.linked and not peer.ready for peer in known))
        network.peers("gone").set(sum(not peer.linked for peer in known))

    def _training(self, worker: Worker) -> None:
        assert worker.data is not None
        training, microbatches = self.metrics.training, self.metrics.microbatches
        ledger = worker.data.ledger
        training.tokens.inc(self._since("tokens", "", ledger.tokens))
        if worker.data.loss is not None:
            training.loss.set(worker.data.loss)
        done = microbatches.done
        done("backward", "done").inc(self._since("done", "", ledger.committed))
        done("backward", "dropped").inc(self._since("dropped", "", sum(ledger.dropped.values())))
        done("forward", "rerouted").inc(self._since("rerouted", "", sum(ledger.rerouted.values())))
        done("forward", "repeated").inc(self._since("repeated", "", ledger.repeated))
        done("forward", "refused").inc(self._since("busy", "", ledger.refused))
        microbatches.queue.set(worker.compute.queued)
        microbatches.open.set(worker.data.pipeline.under_way)
        if worker.update is not None:
            rounds, metrics = worker.update.rounds, self.metrics.rounds
            if self._since("applied", "", rounds.applied + 1) > 0:
                training.last_step.set(time.time())
            metrics.round.set(rounds.current)
            metrics.settled.set(rounds.settled)
            newest = max((view.round for view in rounds.neighbours.values()), default=rounds.current)
            metrics.lag.set(max(0, newest - rounds.current))
            for outcome, count in worker.update.outcomes.items():
                metrics.updates(outcome).inc(self._since("updates", outcome, count))

    def _since(self, name: str, label: str, count: int) -> int:
        """How much a counter has grown since the last look (a new worker starts again at 0)."""
        before = self._counted.get((name, label), 0)
        self._counted[(name, label)] = count
        return count - before if count >= before else count


def ledger_fields(ledger: Ledger) -> dict[str, object]:
    return {
        "committed": ledger.committed,
        "tokens": ledger.tokens,
        "repeated": ledger.repeated,
        "dropped": dict(ledger.dropped),
        "rerouted": dict(ledger.rerouted),
        "refused": ledger.refused,
        "late_answers": ledger.late_answers,
    }
