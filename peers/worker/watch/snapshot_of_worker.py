"""The swarm snapshot as one running worker sees it, for its metrics, status line and `swarmnet top`."""

from __future__ import annotations

import time
from dataclasses import replace

from peers.compute.process_memory import resident_bytes
from peers.telemetry import log_events
from peers.telemetry.event import short
from peers.telemetry.reasons import stuck_lines
from peers.telemetry.snapshot import IN_STEP, PeerRow, SwarmSnapshot, complete
from peers.worker.stage_services import StageServices
from peers.worker.worker import Worker
from swarmnet.identifiers import RUN_DIGITS
from swarmnet.membership.membership import BEAT_SECONDS
from swarmnet.membership.peer_info import HELPER_ROLE, PeerInfo
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
    context, services = worker.context, worker.services
    known = SwarmSnapshot(
        f"peer {name or context.identity.peer_id[-6:]}",
        time.time(),
        context.manifest.name,
        context.signed.run_id,
        worker.state,
        memory_bytes=resident_bytes(),
    )
    if services is None:
        return known
    pipeline, service, traffic = services.pipeline_service, services.round_service, services.links.traffic
    stuck = _stuck(services)
    own = PeerRow(
        context.identity.peer_id,
        services.stage,
        worker.state,
        name,
        round=service.rounds.current if service.has_weights else None,
        loss=pipeline.losses.mean,
        tokens=pipeline.ledger.tokens,
        tokens_per_second=tokens_per_second,
        can_do=_can_do(services, pipeline.service.seconds),
        sent_bytes=traffic.sent.total(),
        received_bytes=traffic.received.total(),
        here=True,
    )
    known = replace(
        known,
        rows=(own, *_neighbours(services)),
        round=own.round,
        settled=service.rounds.settled if service.has_weights else None,
        lag=_lag(service.rounds) if service.has_weights else None,
        loss=own.loss,
        tokens=own.tokens,
        finalized_tokens=service.tokens,
        tokens_per_second=tokens_per_second,
        sent=dict(traffic.sent),
        received=dict(traffic.received),
        microbatches=microbatches_of(pipeline.ledger),
        rounds=dict(service.counts.ended.items()),
        comparisons=dict(pipeline.checks.outcomes),
        not_compared=pipeline.checks.alone,
        idle_share=idle_share,
        utilization=utilization,
        gradient_norm=service.counts.norms[0],
        waits_for=tuple(stage for stage in pipeline.missing.now if stage not in stuck),
        warnings=(*stuck_of_worker(worker), *_avoided(services)),
    )
    spans = map(context.manifest.span, range(len(context.manifest.stages)))
    return complete(known, [len(span.layers) for span in spans])


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
    services = worker.services
    return stuck_lines(_stuck(services), worker.context.signed.run_id) if services is not None else ()


def _avoided(services: StageServices) -> list[str]:
    """Return a sentence for each peer that gets no work because its values differ from those of others."""
    service, run = services.pipeline_service, services.context.signed.run_id[:RUN_DIGITS]
    return [
        f"Peer {short(peer)} answers otherwise than others: it gets no work from here for {seconds:.0f} s. "
        f"If this repeats, the owner can ban it: swarmnet order ban {run} {peer}"
        for peer, seconds in service.pipeline.router.shunned(service.clock.time()).items()
    ]


def _stuck(services: StageServices) -> dict[int, int]:
    service, state = services.round_service, services.lifecycle.state
    if not service.has_weights:
        return {}
    linked = [known for known in services.links.membership.peers.values() if known.linked]
    standing = [StagePeer(known.stage, not known.ready, known.round) for known in linked]
    standing.append(StagePeer(services.stage, state not in IN_STEP, service.rounds.current))
    return stuck_stages(standing, services.context.manifest.rounds.rounds_from_seed)


def _neighbours(services: StageServices) -> list[PeerRow]:
    now = services.links.clock.time()
    return [
        PeerRow(
            peer,
            known.stage,
            _state(known, now),
            known.name,
            role=HELPER_ROLE if known.is_helper else "worker",
            round=known.round if known.linked else None,
            can_do=_can_do(services, known.service_seconds) if known.linked else None,
        )
        for peer, known in services.links.membership.peers.items()
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


def _can_do(services: StageServices, service_seconds: float) -> float | None:
    """Return the tokens per second of a peer that takes `service_seconds` for a microbatch."""
    tokens = services.context.manifest.microbatch_tokens
    return tokens / service_seconds if service_seconds > 0 else None
