"""Who is there, by the directory: the newest signed record of every peer."""

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
from swarmnet.placement.standstill import Standing, stuck_stages

LOOK_UP_SECONDS = 10.0
"""Deadline of one look-up (as in announcer.py)."""
QUIET_SECONDS = 2.5 * ANNOUNCE_SECONDS
"""A peer whose record is older has missed two announcements."""
WAITING = ("connecting", "joining")
"""A peer in one of these states has no weights yet."""
OBSERVER = "observer"
"""Its role, in its record."""


def opened(records: Iterable[bytes], run: RunId) -> Iterator[SignedRecord]:
    """Those that can be read. The gate lets no other in; a directory without one might."""
    for data in records:
        with suppress(WireError):
            yield open_record(data, run)


def newest(records: Iterable[SignedRecord]) -> dict[PeerId, SignedRecord]:
    """One of each peer: who has moved, or is paused, stands under its old stage for a while."""
    found: dict[PeerId, SignedRecord] = {}
    for signed in records:
        known = found.get(signed.peer)
        if known is None or known.sequence < signed.sequence:
            found[signed.peer] = signed
    return found


async def look(directory: Directory, run: RunId, stages: int) -> dict[PeerId, SignedRecord]:
    """Of every stage, and of those without one. Raises WireError if the directory is silent about any: a
    stage of which nothing is known must not pass for an empty one."""
    asked = (directory.look_up(run, stage, LOOK_UP_SECONDS) for stage in range(-1, stages))
    found: list[SignedRecord] = []
    for records in await asyncio.gather(*asked):
        found += opened(records.values(), run)
        await asyncio.sleep(0)  # Between many signatures the loop has other work.
    return newest(found)


def waits_for_weights(record: PeerRecord) -> bool:
    return record.state in WAITING


def stuck_of(records: Iterable[PeerRecord], snapshot_rounds: int) -> dict[int, int]:
    """Return stage -> peers that wait there for weights which no peer of it has. A peer that leaves counts
    no more: its last record outlives it."""
    standing = [
        Standing(record.stage, waits_for_weights(record), record.round)
        for record in records
        if record.state != "leaving"
    ]
    return stuck_stages(standing, snapshot_rounds)


def settled_tokens(records: Iterable[PeerRecord], stage: int) -> int | None:
    """In all settled rounds of a stage, by the middle one of those who are in step (of two the lower); None:
    nobody says it."""
    told = [record.settled_tokens for record in records
            if record.stage == stage and record.state in IN_STEP and record.settled_tokens >= 0]  # fmt: skip
    return median_low(told) if told else None


def settled_round(records: Iterable[PeerRecord], stage: int) -> int | None:
    """Newest settled round of a stage, by the middle one of those who are in step (of two the lower), as
    `settled_tokens`; -1: they say none; None: nobody is in step."""
    told = [record.settled for record in records if record.stage == stage and record.state in IN_STEP]
    return median_low(told) if told else None


def usual_round(records: Iterable[PeerRecord]) -> int | None:
    """Of the middle one of those who are in step, of any stage (of two the higher); None: nobody is."""
    told = [record.round for record in records if record.stage >= 0 and record.state in IN_STEP]
    return median_high(told) if told else None


def usual_loss(records: Iterable[PeerRecord]) -> float | None:
    """Of those who are in step, the median; None: nobody says one."""
    told = [record.loss for record in records
            if record.stage >= 0 and record.state in IN_STEP and record.loss is not None]  # fmt: skip
    return median(told) if told else None


def eval_loss(records: Iterable[PeerRecord], own: float | None = None) -> float | None:
    """On held-out text: the middle one of what observers say (of two the lower) and of this peer's `own`;
    None: none is there."""
    told = [record.loss for record in records if record.role == OBSERVER and record.loss is not None]
    told += [own] if own is not None else []
    return median_low(told) if told else None
