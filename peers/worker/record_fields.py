"""Collect what a peer claims about itself in its record, for observers and newcomers."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from peers.network.discovery.claims import Claims, plain_name
from peers.network.ports import HeartbeatLoad
from peers.worker.pipeline.text_reader import coverage_of
from peers.worker.stage_services import StageServices

HIGHEST_LOSS = 1e6
"""Upper bound in nats per token: a record takes no higher value, and a higher one means nothing."""


def claims_of(services: StageServices, load: HeartbeatLoad) -> Claims:
    """Return the claims as of now. `load` is what heartbeats report."""
    settings, part = services.context.settings, services.part
    pipeline, service = services.pipeline_service, services.round_service
    seconds = load.service_seconds
    loss = pipeline.losses.mean
    saved = services.disk.saved
    coverage = coverage_of(pipeline.origin.text)
    held = service.held_experts()
    return Claims(
        state=services.lifecycle.state,
        name=plain_name(settings.name),
        round=service.rounds.current,
        tokens_per_second=services.context.manifest.microbatch_tokens / seconds if seconds > 0 else 0.0,
        moving_to=load.moving_to,
        loss=loss if loss is not None and isfinite(loss) and 0 <= loss <= HIGHEST_LOSS else None,
        tokens=pipeline.ledger.tokens,
        settled=service.rounds.settled,
        checkpoint_round=saved[1] if saved is not None else -1,
        checkpoint_seconds=_written_at(saved[0]) if saved is not None else 0.0,
        sent_bytes=services.links.traffic.sent.total(),
        received_bytes=services.links.traffic.received.total(),
        finalized_tokens=service.tokens,
        device=part.kind or part.device.type,
        joules=settings.joules(),
        text_shards=coverage.shards if coverage is not None else 0,
        text_shards_read=coverage.read_ever if coverage is not None else 0,
        line=settings.line,
        experts_group=held.group if held is not None else -1,
        experts_trained=held.trained if held is not None else (),
    )


def _written_at(path: Path) -> float:
    """Return the Unix time when the file was written, also by an earlier process; 0 if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
