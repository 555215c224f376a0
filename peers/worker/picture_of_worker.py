"""The picture as one running worker sees it: what it answers when `swarmnet top` asks over its socket."""

from __future__ import annotations

import time
from typing import Any

from peers.compute.process_memory import resident_bytes
from peers.network.discovery.record_reader import IN_STEP
from peers.network.neighbourhood import Neighbourhood
from peers.telemetry.event_fold import Story, counts_of
from peers.telemetry.notices import short
from peers.telemetry.picture import PeerSeen, Picture, as_json, curve
from peers.telemetry.reasons import stuck_lines
from peers.worker.sampler import ledger_event
from peers.worker.worker import Worker
from swarmnet.membership.machine import BEAT_SECONDS, Known
from swarmnet.placement.standstill import Standing, stuck_stages


def view(
    worker: Worker | None, story: Story, name: str = "", state: str = "", idle: float | None = None,
    utilization: float | None = None, warnings: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """Everything that `swarmnet top` shows, as plain JSON data. `story` has heard the peer's event log from
    its start; `state`: what the role says it is at when it has no worker (paused, connecting); `idle`: the
    share of the last seconds in which it computed nothing; `utilization`: of what its device can do;
    `warnings`: sentences of the role, beside those of the worker."""
    return as_json(picture_of(worker, story, name, state, idle, utilization, warnings))


def picture_of(
    worker: Worker | None, story: Story, name: str = "", state: str = "", idle: float | None = None,
    utilization: float | None = None, warnings: tuple[str, ...] = (),
) -> Picture:  # fmt: skip
    now, losses, events = time.time(), curve(story.losses.points), tuple(story.events)
    source = f"peer {name or short(story.peer)}"
    if worker is None or worker.neighbourhood is None or worker.data is None:
        state = worker.state if worker is not None else state or story.state
        return Picture(source, now, story.run, state, loss=story.recent.mean, losses=losses, events=events,
                       memory_bytes=resident_bytes())  # fmt: skip
    data, update, traffic = worker.data, worker.update, worker.neighbourhood.traffic
    own = PeerSeen(
        peer=worker.identity.peer_id,
        stage=worker.stage,
        state=worker.state,
        name=name,
        round=update.rounds.current if update is not None else None,
        loss=data.losses.mean,
        tokens_per_second=story.speed(now),
        can_do=_can_do(worker, data.service_seconds),
        sent_bytes=traffic.sent.total(),
        received_bytes=traffic.received.total(),
        here=True,
    )
    peers = [own, *_neighbours(worker, worker.neighbourhood)]
    group = (seen.round for seen in peers if seen.stage == own.stage and seen.round is not None)
    newest = max(group, default=None)
    stuck = _stuck(worker)
    return Picture(
        source=source,
        time=now,
        run=worker.manifest.name,
        state=worker.state,
        stages=len(worker.manifest.stages),
        peers=tuple(sorted(peers, key=lambda seen: (seen.stage, not seen.here, seen.peer))),
        round=own.round,
        settled=update.rounds.settled if update is not None else None,
        lag=max(0, newest - own.round) if newest is not None and own.round is not None else None,
        loss=data.losses.mean,
        losses=losses,
        tokens=data.ledger.tokens,
        settled_tokens=update.tokens if update is not None else None,
        tokens_per_second=own.tokens_per_second,
        sent=dict(traffic.sent),
        received=dict(traffic.received),
        microbatches=counts_of(ledger_event(data.ledger)),
        rounds=dict(update.counts.ended.items()) if update is not None else {},
        idle_share=idle,
        utilization=utilization,
        memory_bytes=resident_bytes(),
        gradient_norm=update.counts.norms[0] if update is not None else None,
        events=events,
        waits_for=tuple(stage for stage in data.missing if stage not in stuck),
        warnings=(*stuck_of_worker(worker), *warnings),
    )


def stuck_of_worker(worker: Worker) -> tuple[str, ...]:
    """Why the run stands still, as far as this peer knows, and what a person can type."""
    if worker.elsewhere.why:
        return (worker.elsewhere.why,)
    return stuck_lines(_stuck(worker), worker.signed.run_id)


def _stuck(worker: Worker) -> dict[int, int]:
    if worker.neighbourhood is None or worker.update is None:
        return {}
    linked = [known for known in worker.neighbourhood.membership.peers.values() if known.linked]
    standing = [Standing(known.stage, not known.ready, known.round) for known in linked]
    standing.append(Standing(worker.stage, worker.state not in IN_STEP, worker.update.rounds.current))
    return stuck_stages(standing, worker.manifest.rounds.snapshot_rounds)


def _neighbours(worker: Worker, neighbourhood: Neighbourhood) -> list[PeerSeen]:
    now = neighbourhood.clock.time()
    return [
        PeerSeen(peer, known.stage, _state(known, now), round=known.round if known.linked else None,
                 can_do=_can_do(worker, known.service_seconds) if known.linked else None)
        for peer, known in neighbourhood.membership.peers.items()
    ]  # fmt: skip


def _state(known: Known, now: float) -> str:
    if not known.linked:
        return "gone" if known.failures else "known"
    if now - known.heard_at > 2 * BEAT_SECONDS:
        return "suspect"
    return "training" if known.ready else "joining"


def _can_do(worker: Worker, service_seconds: float) -> float | None:
    data = worker.manifest.data
    tokens = data.sequence_tokens * data.microbatch_sequences
    return tokens / service_seconds if service_seconds > 0 else None
