"""How far a run has come, for the day on which nobody of it is there: who remembers it, and who must know.

A bootstrap that was given the run, and an archivist, tell it in their own signed records. Anybody can sign
such a record. So it decides nothing but whether a peer that has no weights begins from the seed by itself, or
waits and says what a person can do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median_low

from peers.config.atomic_files import write_atomically
from peers.config.run_file import export_hint
from peers.errors import UserError
from peers.network.discovery.announcer import Presence
from peers.network.discovery.record_reader import QUIET_SECONDS, settled_round
from peers.telemetry.events import Say
from peers.telemetry.reasons import join_line, way_out
from peers.telemetry.snapshot import IN_STEP
from protocols.errors import WireError
from protocols.signed.peer_record import NO_STAGE, PeerRecord
from protocols.signed.records import SignedRecord, open_record

REMEMBER = ("bootstrap", "archivist")
"""Roles whose records tell how far the run has come."""
ASK_SECONDS = 10.0
HIGHEST = 2**32 - 1
"""As records and envelopes have room for."""


class Height:
    """The highest settled round of a run that was seen; in a file, so that a restart forgets nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.round = self._read()
        self.trained = False
        """Whether somebody trained when last looked at: what the dead have said expires only later."""

    def saw(self, records: Iterable[SignedRecord], now: float) -> None:
        """Of the first stage, which every microbatch passes, what the middle one of its peers says. `now`:
        the directory's time."""
        here = [one for one in records if one.record.stage == 0 and one.record.state in IN_STEP]
        told = [one.record.settled for one in here]
        self.trained = any(now - one.sequence / 1e6 < QUIET_SECONDS for one in here)
        if told and median_low(told) > self.round:
            self.round = median_low(told)
            write_atomically(self.path, json.dumps({"settled": self.round}).encode())

    def _read(self) -> int:
        """-1: none yet; a damaged file is as good as none."""
        try:
            kept = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return -1
        round = kept.get("settled") if isinstance(kept, dict) else None
        return round if isinstance(round, int) and -1 <= round <= HIGHEST else -1


class Elsewhere:
    """Whether a run was trained by peers that are not here now, asked by one that has no weights of it."""

    def __init__(
        self,
        presence: Presence,
        ends: Callable[[], int | None],
        from_seed: bool,
        may_be_empty: Callable[[], bool],
        stage: Callable[[], int],
        say: Say,
    ) -> None:
        """`ends`: the last round, if the owner has ordered one; `from_seed`: the person knows;
        `may_be_empty`: whether the run goes on without anybody in the own `stage`."""
        self.presence = presence
        self.ends = ends
        self.from_seed = from_seed
        self.may_be_empty = may_be_empty
        self.stage = stage
        self.say = say
        self.why = ""
        """Why this peer waits for weights, and what a person can type, in one sentence; empty: it does not
        wait."""
        self._asked_at, self._first, self._height = float("-inf"), -1, -1
        self._told = -1
        """As `_height`, by the first stage and roles that remember it: other stages may differ by a round."""

    async def height(self) -> int:
        """The highest settled round that anybody tells; -1: nobody tells one."""
        await self._ask()
        return self._height

    async def first_stage(self) -> int:
        """What most of the first stage have settled, by their own word; where none of it is in the directory,
        what is remembered. An end goes by this, not by the highest: one forged record must not bring it."""
        await self._ask()
        return self._first if self._first >= 0 else self._height

    async def _ask(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._asked_at + ASK_SECONDS:
            self._asked_at = now
            told = [one.settled for one in await self._records(NO_STAGE) if one.role in REMEMBER]
            # Who has just gone is in the directory for two minutes more, and nobody tells in its place yet.
            first = [one.settled for one in await self._records(0) if one.settled >= 0]
            self._first = median_low(first) if first else -1
            # No stage comes far alone, and after two minutes nothing is left of a stage that was lost.
            manifest, beside = self.presence.signed.manifest, []
            for stage in manifest.beside(self.stage()):
                if 0 <= stage < len(manifest.stages):
                    settled = settled_round(await self._records(stage), stage)
                    beside += [settled] if settled is not None else []
            self._told = max([self._first, *told])
            self._height = max([self._told, *beside])

    async def _records(self, stage: int) -> list[PeerRecord]:
        found = []
        for data in (await self.presence.look_up(stage) or {}).values():
            with suppress(WireError):  # The gate lets none in; a directory without one might.
                found.append(open_record(data, self.presence.signed.run_id).record)
        return found

    def _how_to_export(self) -> str:
        archive = "`swarmnet export --hf FOLDER --from ARCHIVE` reads an archive of the run"
        return f"{export_hint(self.presence.signed, Path('STATE'), ())}; {archive}"

    async def waits(self, lost_round: int = -1) -> bool:
        """Whether not to begin from the seed now; `why` says it then. `lost_round`: the newest round in the
        names of own checkpoints that are all damaged; -1: there are none. Raises UserError where it would
        wait for ever: the run is over."""
        was, self.why = self.why, ""
        lost = lost_round >= 0
        if self.from_seed or (not lost and self.may_be_empty()):
            return False
        height, ends = max(lost_round, await self.height()), self.ends()
        if not lost and height < self.presence.signed.manifest.rounds.snapshot_rounds:
            return False  # Hardly anything would be lost, and no peer has had a snapshot to keep.
        if ends is not None and height >= ends:
            ended_at = self._told if self._told >= ends else height
            raise UserError(
                f"this run has ended at round {ended_at}, as its owner ordered: nothing is left to train. "
                f"The peers that took part have the weights: {self._how_to_export()}"
            )
        self.why = self._damaged(lost_round) if lost else self._stuck(height)
        if not was:
            self.say("elsewhere", self.why)
        return True

    def _damaged(self, round: int) -> str:
        stage = self.stage()
        return (
            f"all checkpoints of stage {stage} on this disk are damaged, the newest of round {round}: "
            "waits for the weights of another peer and leaves the files as they are; "
            "to give these weights up, stop this peer (Ctrl+C) and type: "
            f"{join_line(self.presence.signed.run_id, stage)} --set from_seed=true"
        )

    def _stuck(self, height: int) -> str:
        stage = self.stage()
        return (
            f"stage {stage} is stuck: this run has come to round {height}, and no peer here has its weights. "
            "Waits for them. Or stop this peer (Ctrl+C) and start it with an archive of the run "
            "(--from-archive), or, if those weights are given up, from the seed (--set from_seed=true). "
            f"{way_out(self.presence.signed.run_id, stage)}"
        )
