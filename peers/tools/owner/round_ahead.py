"""From which round on an order is to hold: far enough ahead that all hear of it before they are there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from statistics import median_low

from peers.errors import UserError
from peers.telemetry.snapshot import IN_STEP
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import ANNOUNCE_SECONDS
from swarmnet.run.manifest import Manifest

AHEAD_SECONDS = 180.0
"""Peers tell an order to their neighbours at once, and who was away hears it with its first link. All ask the
directory once a minute, too. What a record says is at most ANNOUNCE_SECONDS old."""
SPEED_SECONDS = 1.5 * ANNOUNCE_SECONDS
"""By then every peer that computes has told anew what it does, also where one announcement was lost."""


@dataclass(frozen=True, slots=True)
class RecordedProgress:
    """What the peers' records in the directory say."""

    round: int
    """The one that gathers gradients now: of the stage that is furthest, by the middle one of its peers."""
    rounds_per_second: float
    """What the computers of the slowest stage could do, by their peers' word: not less than it is. 0: they
    have not told it yet, and what they tell of their rounds may be as old as they are."""


def seen(manifest: Manifest, records: Iterable[PeerRecord]) -> RecordedProgress | None:
    """None: nobody who trains is there."""
    training = [record for record in records if record.stage >= 0 and record.state in IN_STEP]
    stages = {record.stage for record in training}
    if not stages:
        return None
    rounds = [median_low([record.round for record in training if record.stage == stage]) for stage in stages]
    speeds = [[record.tokens_per_second for record in training if record.stage == stage] for stage in stages]
    slowest = min(len(told) * median_low(told) for told in speeds)
    return RecordedProgress(max(rounds), slowest / manifest.rounds.global_batch_tokens)


@dataclass(frozen=True, slots=True)
class Chosen:
    round: int
    """From which on, at the beginning of a block."""
    why: str


def chosen(manifest: Manifest, now: RecordedProgress | None, wanted: int | None) -> Chosen:
    """The round that is `wanted`, or one far enough ahead. Raises UserError for one that is past."""
    if wanted is not None:
        if now is not None and wanted <= now.round:
            ahead = chosen(manifest, now, None)
            raise UserError(
                f"round {wanted} is past: the run is at round {now.round}. Without --from-round it is round "
                f"{ahead.round}: {ahead.why}"
            )
        at = f"the run is at round {now.round}" if now is not None else "nobody who trains is there to ask"
        return Chosen(wanted, f"as you say; {at}")
    if now is None:
        raise UserError("nobody of the run is there to say at which round it is: name one with --from-round")
    every = manifest.rounds.snapshot_interval
    ahead_rounds = max(every, ceil(AHEAD_SECONDS * now.rounds_per_second))
    round = every * ceil((now.round + ahead_rounds) / every)
    return Chosen(
        round,
        f"the run is at round {now.round} and can make {60 * now.rounds_per_second:.1f} rounds a minute; it "
        f"is given {AHEAD_SECONDS / 60:g} minutes and {every} rounds ahead (rounds.snapshot_interval)",
    )
