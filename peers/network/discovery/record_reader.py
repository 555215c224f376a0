"""Read the newest signed record of every peer from the directory (the DHT), and summarize the records.

A record is a peer's announcement of its state, renewed regularly; nothing verifies its values. A peer is in
step if its state says that it has its group's weights (`IN_STEP`). A settled round can no longer change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from statistics import median, median_high, median_low

from peers.telemetry.snapshot import IN_STEP
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import ANNOUNCE_SECONDS, SignedRecord, open_record
from swarmnet.identifiers import PeerId, RunId
from swarmnet.placement.standstill import StagePeer, stuck_stages

LOOK_UP_SECONDS = 10.0
"""Deadline of one look-up in seconds (as in announcer.py)."""
QUIET_SECONDS = 2.5 * ANNOUNCE_SECONDS
"""A peer whose record is older has missed two announcements."""
WAITING = ("connecting", "joining")
"""States of peers that have no weights yet."""
OBSERVER = "observer"
"""The role of an observer in its record."""


def opened(records: Iterable[bytes], run: RunId) -> Iterator[SignedRecord]:
    """Yield the records that can be verified. The gate removes others; another directory might not."""
    for data in records:
        with suppress(WireError):
            yield open_record(data, run)


def newest(records: Iterable[SignedRecord]) -> dict[PeerId, SignedRecord]:
    """Return the newest record of each peer. One that moved stays listed in its old stage for a while."""
    newest_of: dict[PeerId, SignedRecord] = {}
    for signed in records:
        known = newest_of.get(signed.peer)
        if known is None or known.sequence < signed.sequence:
            newest_of[signed.peer] = signed
    return newest_of


async def look(directory: Directory, run: RunId, stages: int) -> dict[PeerId, SignedRecord]:
    """Look up the records of all stages and of peers without a stage (-1). Returns the newest valid one of
    each peer. Raises WireError if one look-up gets no answer: a stage must not count as empty then."""
    look_ups = (directory.look_up(run, stage, LOOK_UP_SECONDS) for stage in range(-1, stages))
    valid: list[SignedRecord] = []
    for records in await asyncio.gather(*look_ups):
        valid += opened(records.values(), run)
        await asyncio.sleep(0)  # Yield to the event loop between many signature checks.
    return newest(valid)


def waits_for_weights(record: PeerRecord) -> bool:
    return record.state in WAITING


def stuck_of(records: Iterable[PeerRecord], rounds_from_seed: int) -> dict[int, int]:
    """Return by stage how many peers wait for weights, if no peer of that stage has them. Other stages are
    left out. In the run's first `rounds_from_seed` rounds the result is empty: a peer without weights then
    begins from the seed. Peers in state `leaving` do not count, because their last record outlives them."""
    peers = [
        StagePeer(record.stage, waits_for_weights(record), record.round)
        for record in records
        if record.state != "leaving"
    ]
    return stuck_stages(peers, rounds_from_seed)


def finalized_tokens(records: Iterable[PeerRecord], stage: int) -> int | None:
    """Return the tokens in all settled rounds of a stage: the median of the peers in step (of two the lower).
    Returns None if no peer reports it."""
    values = [
        record.finalized_tokens
        for record in records
        if record.stage == stage and record.state in IN_STEP and record.finalized_tokens >= 0
    ]
    return median_low(values) if values else None


def settled_round(records: Iterable[PeerRecord], stage: int) -> int | None:
    """Return the newest settled round of a stage: the median of the peers in step (of two the lower). -1
    means that they report none. Returns None if no peer is in step."""
    values = [record.settled for record in records if record.stage == stage and record.state in IN_STEP]
    return median_low(values) if values else None


def usual_round(records: Iterable[PeerRecord]) -> int | None:
    """Return the median round of the peers in step of any stage (of two the higher), or None."""
    values = [record.round for record in records if record.stage >= 0 and record.state in IN_STEP]
    return median_high(values) if values else None


def usual_loss(records: Iterable[PeerRecord]) -> float | None:
    """Return the median loss of the peers in step; None if no peer reports one."""
    values = [
        record.loss
        for record in records
        if record.stage >= 0 and record.state in IN_STEP and record.loss is not None
    ]
    return median(values) if values else None


def eval_loss(records: Iterable[PeerRecord], own: float | None = None) -> float | None:
    """Return the loss on held-out text: the median of the observers and this peer's `own` (of two the lower).
    Returns None if there is none."""
    values = [record.loss for record in records if record.role == OBSERVER and record.loss is not None]
    values += [own] if own is not None else []
    return median_low(values) if values else None
