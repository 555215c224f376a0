"""Choose the round from which an order applies: far enough ahead that all peers have it before they get
there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from statistics import median_low

from peers.config.errors import UserError
from peers.telemetry.snapshot import IN_STEP
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import ANNOUNCE_SECONDS
from swarmnet.run.manifest import Manifest

AHEAD_SECONDS = 180.0
"""Seconds that an order needs to reach all peers. Peers send an order to their neighbours at once, and a
returning peer gets it with its first link. All peers also read the directory once a minute. A record is at
most ANNOUNCE_SECONDS old."""
SPEED_SECONDS = 1.5 * ANNOUNCE_SECONDS
"""Seconds in which every computing peer has announced its progress again, even if one announcement was
lost."""


@dataclass(frozen=True, slots=True)
class RecordedProgress:
    """Progress of a run by its peers' records in the directory."""

    round: int
    """Round that gathers gradients now, in the most advanced stage, as the median of its peers."""
    rounds_per_second: float
    """Rounds per second that the slowest stage could compute by its peers' records, an upper bound. 0: its
    peers have not announced a speed yet, and their round numbers may be outdated."""


def seen(manifest: Manifest, records: Iterable[PeerRecord]) -> RecordedProgress | None:
    """Return the recorded progress; None if no peer trains."""
    training = [record for record in records if record.stage >= 0 and record.state in IN_STEP]
    stages = {record.stage for record in training}
    if not stages:
        return None
    rounds = [median_low([record.round for record in training if record.stage == stage]) for stage in stages]
    speeds = [[record.tokens_per_second for record in training if record.stage == stage] for stage in stages]
    slowest = min(len(speed) * median_low(speed) for speed in speeds)
    return RecordedProgress(max(rounds), slowest / manifest.rounds.global_batch_tokens)


@dataclass(frozen=True, slots=True)
class Chosen:
    round: int
    """First round of the order, at the start of a block."""
    why: str


def chosen(manifest: Manifest, now: RecordedProgress | None, wanted: int | None) -> Chosen:
    """Return the `wanted` round, or one far enough ahead. Raises UserError for a round in the past."""
    if wanted is not None:
        if now is not None and wanted <= now.round:
            ahead = chosen(manifest, now, None)
            raise UserError(
                f"round {wanted} is past: the run is at round {now.round}. Without --from-round it is round "
                f"{ahead.round}: {ahead.why}"
            )
        at = f"the run is at round {now.round}" if now is not None else "no training peer was found"
        return Chosen(wanted, f"as requested; {at}")
    if now is None:
        raise UserError("no training peer was found to ask for the round: name one with --from-round")
    every = manifest.rounds.snapshot_interval
    ahead_rounds = max(every, ceil(AHEAD_SECONDS * now.rounds_per_second))
    round = every * ceil((now.round + ahead_rounds) / every)
    return Chosen(
        round,
        f"the run is at round {now.round} and can make {60 * now.rounds_per_second:.1f} rounds a minute; it "
        f"is given {AHEAD_SECONDS / 60:g} minutes and {every} rounds ahead (rounds.snapshot_interval)",
    )
