"""The swarm snapshot as one running worker sees it, for its metrics, status line and `swarmnet top`."""

from __future__ import annotations

import time

from peers.compute.process_memory import resident_bytes
from peers.network.peer_links import PeerLinks
from peers.telemetry import log_events
from peers.telemetry.reasons import stuck_lines
from peers.telemetry.snapshot import IN_STEP, PeerRow, SwarmSnapshot, complete
from peers.worker.worker import Worker
from swarmnet.membership.membership import BEAT_SECONDS, PeerInfo
from swarmnet.pipeline.ledger import MicrobatchLedger
from swarmnet.placement.standstill import StagePeer, stuck_stages
from swarmnet.rounds.group_rounds import GroupRounds


def snapshot_of(
    worker: Worker,
    name: str = "",
    *,
    tokens_per_second: float | None = None,
    idle_share: float | None = None,
    utilization: float | None = None,
) -> SwarmSnapshot:
    """Return the snapshot. `name` is from the peer file, `tokens_per_second` covers the last seconds.
    `idle_share` is the fraction of time without compute; `utilization` is relative to the device's peak."""
    now, source, stuck = time.time(), f"peer {name or worker.identity.peer_id[-6:]}", _stuck(worker)
    if worker.neighbourhood is None or worker.data is None:
        return SwarmSnapshot(
            source,
            now,
            worker.manifest.name,
            worker.signed.run_id,
            worker.state,
            memory_bytes=resident_bytes(),
        )
    data, update, traffic = worker.data, worker.update, worker.neighbourhood.traffic
    own = PeerRow(
        worker.identity.peer_id,
        worker.stage,
        worker.state,
        name,
        round=update.rounds.current if update is not None else None,
        loss=data.losses.mean,
        tokens=data.ledger.tokens,
        tokens_per_second=tokens_per_second,
        can_do=_can_do(worker, data.service.seconds),
        sent_bytes=traffic.sent.total(),
        received_bytes=traffic.received.total(),
        here=True,
    )
    known = SwarmSnapshot(
        source,
        now,
        worker.manifest.name,
        worker.signed.run_id,
        worker.state,
        rows=(own, *_neighbours(worker, worker.neighbourhood)),
        round=own.round,
        settled=update.rounds.settled if update is not None else None,
        lag=_lag(update.rounds) if update is not None else None,
        loss=own.loss,
        tokens=own.tokens,
        finalized_tokens=update.tokens if update is not None else None,
        tokens_per_second=tokens_per_second,
        sent=dict(traffic.sent),
        received=dict(traffic.received),
        microbatches=microbatches_of(data.ledger),
        rounds=dict(update.counts.ended.items()) if update is not None else {},
        idle_share=idle_share,
        utilization=utilization,
        memory_bytes=resident_bytes(),
        gradient_norm=update.counts.norms[0] if update is not None else None,
        waits_for=tuple(stage for stage in data.missing.now if stage not in stuck),
        warnings=stuck_of_worker(worker),
    )
    spans = map(worker.manifest.span, range(len(worker.manifest.stages)))
    return complete(known, [span.stop - span.first for span in spans])


def microbatches_of(ledger: MicrobatchLedger) -> dict[str, int]:
    """Return the number of microbatches by outcome; a cancelled one is no failure."""
    cancelled = ledger.dropped.get("cancelled", 0)
    return {
        "committed": ledger.committed,
        "rerouted": sum(ledger.rerouted.values()),
        "repeated": ledger.repeated,
        "dropped": sum(ledger.dropped.values()) - cancelled,
        "cancelled": cancelled,
        "refused": ledger.refused,
        "late_answers": ledger.late_answers,
    }


def ledger_event(ledger: MicrobatchLedger) -> log_events.Ledger:
    return log_events.Ledger(
        ledger.committed,
        ledger.tokens,
        ledger.repeated,
        dict(ledger.dropped),
        dict(ledger.rerouted),
        ledger.refused,
        ledger.late_answers,
    )


def stuck_of_worker(worker: Worker) -> tuple[str, ...]:
    """Return why the run is stuck, as far as this peer knows, and the command that helps."""
    if worker.elsewhere.why:
        return (worker.elsewhere.why,)
    return stuck_lines(_stuck(worker), worker.signed.run_id)


def _stuck(worker: Worker) -> dict[int, int]:
    if worker.neighbourhood is None or worker.update is None:
        return {}
    linked = [known for known in worker.neighbourhood.membership.peers.values() if known.linked]
    standing = [StagePeer(known.stage, not known.ready, known.round) for known in linked]
    standing.append(StagePeer(worker.stage, worker.state not in IN_STEP, worker.update.rounds.current))
    return stuck_stages(standing, worker.manifest.rounds.snapshot_interval)


def _neighbours(worker: Worker, neighbourhood: PeerLinks) -> list[PeerRow]:
    now = neighbourhood.clock.time()
    return [
        PeerRow(
            peer,
            known.stage,
            _state(known, now),
            round=known.round if known.linked else None,
            can_do=_can_do(worker, known.service_seconds) if known.linked else None,
        )
        for peer, known in neighbourhood.membership.peers.items()
    ]


def _lag(rounds: GroupRounds) -> int:
    newest = max((view.round for view in rounds.neighbours.values()), default=rounds.current)
    return max(0, newest - rounds.current)


def _state(known: PeerInfo, now: float) -> str:
    if not known.linked:
        return "gone" if known.failures else "known"
    if now - known.heard_at > 2 * BEAT_SECONDS:
        return "suspect"
    return "training" if known.ready else "joining"


def _can_do(worker: Worker, service_seconds: float) -> float | None:
    data = worker.manifest.data
    tokens = data.seq_len * data.micro_batch_size
    return tokens / service_seconds if service_seconds > 0 else None
