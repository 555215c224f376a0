"""Remember how far a run has come, in case all its peers are gone.

Bootstraps that were given the run, and archivists, report it in their own signed records. Anyone can sign
such a record. It therefore decides only whether a peer without weights starts from the seed automatically, or
waits and shows the user what to do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.run_file import export_hint
from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.discovery.record_reader import QUIET_SECONDS, settled_round
from peers.telemetry.log_events import Notify
from peers.telemetry.reasons import join_line, way_out
from peers.telemetry.snapshot import IN_STEP
from protocols.errors import WireError
from protocols.signed.peer_record import NO_STAGE, PeerRecord
from protocols.signed.records import RECORD_SECONDS, SignedRecord, open_record

REMEMBER = ("bootstrap", "archivist")
"""Roles whose records report how far the run has come."""
ASK_SECONDS = 10.0
OTHER_MAY_RUN = (
    "another process has used this identity within the last two minutes and may hold the weights of this "
    "stage: waits until it is clear whether that process still runs"
)
HIGHEST = 2**32 - 1
"""The largest round that records and envelopes can hold."""


class HighestFinalizedRound:
    """The highest settled round of a run that was seen. It is kept in a file across restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.round = self._read()
        self.trained = False
        """True if some peer was training at the last update. Records of dead peers expire only later."""

    def saw(self, records: Iterable[SignedRecord], now: float) -> None:
        """Update `round` if the median settled round of the first stage, which every microbatch passes, is
        higher. Set `trained`. Only peers with the stage's weights count. `now` is the directory's time."""
        first_stage = [signed for signed in records if signed.record.stage == 0]
        active = [signed for signed in first_stage if signed.record.state in IN_STEP]
        settled = [signed.record.settled for signed in active]
        # A record's sequence is its time in microseconds.
        self.trained = any(now - signed.sequence / 1e6 < QUIET_SECONDS for signed in active)
        if settled and median_low(settled) > self.round:
            self.round = median_low(settled)
            write_atomically(self.path, json.dumps({"settled": self.round}).encode())

    def _read(self) -> int:
        """Return the stored round; -1 if there is none or the file is damaged."""
        try:
            kept = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return -1
        round = kept.get("settled") if isinstance(kept, dict) else None
        return round if isinstance(round, int) and -1 <= round <= HIGHEST else -1


@dataclass(eq=False, kw_only=True)
class RemoteProgressGuard:
    """Finds out whether a run was trained by peers that are gone, for a peer without weights. `ends` returns
    the last round if the owner ordered one. `allow_reinit` is True if the user allows a new start.
    `may_be_empty` returns whether the run continues without any peer in the stage."""

    presence: RecordAnnouncer
    ends: Callable[[], int | None]
    allow_reinit: bool
    may_be_empty: Callable[[], bool]
    stage: Callable[[], int]
    notify: Notify

    def __post_init__(self) -> None:
        self.why = ""
        """Why this peer waits for weights and which command helps; empty if it does not wait."""
        self._other_may_run = False
        """True if `why` says that another process with this identity may be running."""
        self._updated_at = float("-inf")
        self._first = -1
        self._height = -1
        self._reported = -1
        """Like `_height`, but from the first stage and REMEMBER; other stages may differ by a round."""

    async def height(self) -> int:
        """Return the highest settled round that any peer reports; -1 if there is none."""
        await self._update()
        return self._height

    async def first_stage(self) -> int:
        """Return the median settled round of the first stage's peers, or the remembered round if there are
        none. The end of a run depends on this, not on the highest round, which one forged record could
        set."""
        await self._update()
        return self._first if self._first >= 0 else self._height

    async def _update(self) -> None:
        """Look up again, at most every `ASK_SECONDS`, how far the run has come. Sets `_first` from the first
        stage, `_reported` also from what bootstraps and archivists remember, and `_height` also from the
        stages adjacent to this peer's."""
        now = asyncio.get_running_loop().time()
        if now >= self._updated_at + ASK_SECONDS:
            self._updated_at = now
            without_stage = await self._records(NO_STAGE)
            remembered = [record.settled for record in without_stage if record.role in REMEMBER]
            # Peers that left count for the two minutes that their records last; then `remembered` does.
            first = [record.settled for record in await self._records(0) if record.settled >= 0]
            self._first = median_low(first) if first else -1
            # Adjacent stages count too: no stage advances alone, and a lost one soon has no records left.
            manifest, beside = self.presence.signed.manifest, []
            for stage in manifest.neighbour_stages(self.stage()):
                if 0 <= stage < len(manifest.stages):
                    settled = settled_round(await self._records(stage), stage)
                    if settled is not None:
                        beside.append(settled)
            self._reported = max([self._first, *remembered])
            self._height = max([self._reported, *beside])

    async def _records(self, stage: int) -> list[PeerRecord]:
        found = []
        for data in (await self.presence.look_up(stage) or {}).values():
            with suppress(WireError):  # The gate removes them; another directory might not.
                found.append(open_record(data, self.presence.signed.run_id).record)
        return found

    def _how_to_export(self) -> str:
        archive = "`swarmnet export --hf FOLDER --from ARCHIVE` reads an archive of the run"
        return f"{export_hint(self.presence.signed, Path('STATE'), ())}; {archive}"

    async def waits(self, lost_round: int = -1) -> bool:
        """Return True if this peer must not start from the seed now; `why` then explains it. `lost_round` is
        the newest round in the names of its own checkpoints if all are damaged, or -1. Raises UserError if
        the run is over, because the wait would never end."""
        old_why = self.why
        self.why = ""
        other_ran = self._other_may_run
        self._other_may_run = False
        is_damaged = lost_round >= 0
        if self.allow_reinit or (not is_damaged and self.may_be_empty()):
            return False
        height, ends = max(lost_round, await self.height()), self.ends()
        if not is_damaged and height < self.presence.signed.manifest.rounds.rounds_from_seed:
            return False  # Little would be lost, and perhaps no peer has had a snapshot to keep.
        if ends is not None and height >= ends:
            ended_at = self._reported if self._reported >= ends else height
            raise UserError(
                f"this run has ended at round {ended_at}, as its owner ordered: nothing is left to train. "
                f"The peers that took part have the weights: {self._how_to_export()}"
            )
        # The newest record of an earlier process with this identity, in seconds; 0: none was seen.
        newest = self.presence.own_start.newest_of_earlier / 1e6
        is_recent = newest > 0 and self.presence.directory.now() < newest + RECORD_SECONDS
        self._other_may_run = not is_damaged and is_recent
        if self._other_may_run:
            self.why = OTHER_MAY_RUN
        else:
            self.why = self._damaged(lost_round) if is_damaged else self._stuck(height)
        if not old_why or other_ran != self._other_may_run:
            self.notify("elsewhere", self.why)
        return True

    def _damaged(self, round: int) -> str:
        stage = self.stage()
        return (
            f"all checkpoints of stage {stage} on this disk are damaged, the newest of round {round}: "
            "waits for the weights of another peer and leaves the files as they are; "
            "to give these weights up, stop this peer (Ctrl+C) and type: "
            f"{join_line(self.presence.signed.run_id, stage)} --set allow_reinit=true"
        )

    def _stuck(self, height: int) -> str:
        stage = self.stage()
        return (
            f"stage {stage} is stuck: this run has come to round {height}, and no peer here has its weights. "
            "Waits for them. Or stop this peer (Ctrl+C) and start it with an archive of the run "
            "(--from-archive), or, if those weights are given up, from the seed (--set allow_reinit=true). "
            f"{way_out(self.presence.signed.run_id, stage)}"
        )
