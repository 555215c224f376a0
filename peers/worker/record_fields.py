"""Collect what a peer claims about itself in its record, for observers and newcomers."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from peers.network.discovery.claims import Claims, plain_name
from peers.worker.pipeline.text_reader import coverage_of
from peers.worker.worker_context import WorkerContext

HIGHEST_LOSS = 1e6
"""Upper bound in nats per token: a record takes no higher value, and a higher one means nothing."""


def claims_of(worker: WorkerContext) -> Claims:
    """Return the claims as of now; also works before the worker's parts exist."""
    data, update, neighbourhood = worker.data, worker.update, worker.neighbourhood
    shape = worker.manifest.data
    microbatch_tokens = shape.seq_len * shape.micro_batch_size
    seconds = worker.load().service_seconds
    loss = data.losses.mean if data is not None else None
    saved = worker.disk.saved if neighbourhood is not None else None
    coverage = coverage_of(data.origin.text) if data is not None else None
    traffic = neighbourhood.traffic if neighbourhood is not None else None
    held = update.work.method.held if update is not None else None
    return Claims(
        state=worker.state,
        name=plain_name(worker.settings.name),
        round=update.rounds.current if update is not None else 0,
        tokens_per_second=microbatch_tokens / seconds if seconds > 0 else 0.0,
        moving_to=worker.moving.moving_to if data is not None else -1,
        loss=loss if loss is not None and isfinite(loss) and 0 <= loss <= HIGHEST_LOSS else None,
        tokens=data.ledger.tokens if data is not None else 0,
        settled=update.rounds.settled if update is not None else -1,
        checkpoint_round=saved[1] if saved is not None else -1,
        checkpoint_seconds=_written_at(saved[0]) if saved is not None else 0.0,
        sent_bytes=traffic.sent.total() if traffic is not None else 0,
        received_bytes=traffic.received.total() if traffic is not None else 0,
        finalized_tokens=update.tokens if update is not None else None,
        device=(worker.part.kind or worker.part.device.type) if data is not None else "",
        joules=worker.settings.joules(),
        text_shards=coverage.shards if coverage is not None else 0,
        text_shards_read=coverage.read_ever if coverage is not None else 0,
        line=worker.settings.line,
        experts_group=held.holding.group if held is not None else -1,
        experts_trained=held.holding.trained if held is not None else (),
    )


def _written_at(path: Path) -> float:
    """Return the Unix time when the file was written, also by an earlier process; 0 if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
