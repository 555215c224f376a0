"""Read a worker's checkpoints at the start and write new ones regularly; a full disk does not stop it.

A checkpoint is a file with the settled weights of one stage after one round. A snapshot is the same in
memory, kept for peers that join."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from peers.compute.executor import Compute, computed
from peers.compute.stage_part import StagePart
from peers.config.run_file import SignedManifest
from peers.state import checkpoint_file
from peers.state.partial_download import KeptChunks
from peers.state.snapshot_store import Snapshots, Weights
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from swarmnet.lineage import NO_RETURN, Lineage
from swarmnet.rounds.history import START
from swarmnet.rounds.own_contributions import NOTHING_PAST, RestartState

LOOK_SECONDS = 1.0
REFUSED_SECONDS = 60.0
"""Interval of messages that the disk refuses. Writing is retried every second, to use free space at once."""
DOWNLOAD = "download"
"""The folder for downloads, inside the folder of the checkpoints."""


def aligned(snapshot_interval: int, wanted_rounds: float) -> int:
    """Return the interval in rounds between saves: `snapshot_interval`, doubled as often as the result stays
    within `wanted_rounds`. Slow and fast peers thus save some of the same rounds, which their disks have in
    common when the whole group restarts."""
    every = snapshot_interval
    while 2 * every <= wanted_rounds:
        every *= 2
    return every


class KeepsStatements(Protocol):
    """Stores the group's signatures on its settled weights (worker/rounds/digest_gossip.py) with the
    weights."""

    def of_round(self, round: int) -> list[bytes]: ...

    def restore(self, kept: Iterable[bytes]) -> None: ...


class CheckpointWriter:
    """The checkpoints of a worker on disk. With `folder` None, nothing is stored."""

    def __init__(
        self,
        *,
        folder: Path | None,
        signed: SignedManifest,
        stage: int,
        part: StagePart,
        compute: Compute,
        log_event: log_events.LogEvent,
        notify: Notify,
        digests: KeepsStatements,
        past: Callable[[int], RestartState],
        lineage: Lineage = NO_RETURN,
    ) -> None:
        """Create the writer. `past(round)` returns what is known of the rounds up to that one. Only the
        checkpoints that `lineage` admits are used."""
        self.lineage = lineage
        self.given_up: list[Path] = []
        """Checkpoints that the owner's return to snapshots gives up. They keep their names until the snapshot
        is here."""
        self.folder = folder
        self.signed = signed
        self.stage = stage
        self.part = part
        self.compute = compute
        self.log_event = log_event
        self.notify = notify
        self.digests = digests
        self.past = past
        self.chunks = KeptChunks(None if folder is None else folder / DOWNLOAD, notify)
        """Chunks of a state that is being downloaded."""
        self.saved: tuple[Path, int] | None = None
        """File and round of the newest checkpoint."""
        self.damaged: dict[Path, int] = {}
        """Unusable files of this stage and the rounds in their names. They stay unchanged."""
        self._report_again_at = 0.0
        """Time from which the next refusal of the disk is reported."""

    def restored(self) -> list[Weights]:
        """Read all checkpoints of this stage, and return the weights of the usable ones, newest first. All
        others are reported to the user; the damaged ones, but not those of another run, go into `damaged`."""
        restored: list[Weights] = []
        self.saved = None
        self.damaged.clear()
        self.given_up.clear()
        for path in checkpoint_file.files(self.folder, self.stage) if self.folder is not None else ():
            try:
                checkpoint, units = checkpoint_file.restore_signed(
                    path, self.signed.run_id, self.stage, self.part.state
                )
            except checkpoint_file.CheckpointError as error:
                if not isinstance(error, checkpoint_file.OtherCheckpoint):
                    self.damaged[path] = checkpoint_file.stage_and_round(path)[1]
                self.notify(
                    "checkpoint_unusable",
                    f"{error}; it stays as it is, and an older one or the swarm's state is used",
                )
                continue
            self.digests.restore(checkpoint.signed)
            round, root = checkpoint.round, (checkpoint.round, checkpoint.digest)
            if not self.lineage.admits(root, checkpoint.chain):
                self.given_up += [path] * self.lineage.gives_up(root, checkpoint.chain)
                continue
            chain = self.lineage.continue_chain(root, checkpoint.chain)
            past = checkpoint.past if chain == checkpoint.chain else NOTHING_PAST
            self.notify("restored", f"has the weights of round {round} in its own checkpoint")
            if self.saved is None:
                self.saved = path, round
            restored.append(Weights(units, round, chain, past, checkpoint.tokens))
        return restored

    def forget_after(self, round: int) -> None:
        """Rename the checkpoints that are newer than `round`, so that they are not used. The group continues
        from `round` and has abandoned the branch of the newer weights."""
        if self.folder is not None:
            newer = checkpoint_file.newer_files(self.folder, self.stage, round, self.damaged)
            self.saved = None if newer else self.saved
            self.given_up = [path for path in self.given_up if path not in newer]
            self._set_aside(newer, f"the group goes on from round {round}: newer weights are")

    def set_given_up_aside(self) -> None:
        """Rename the checkpoints of a history that the owner gave up. Called when weights of the present one
        are here."""
        self._set_aside(self.given_up, "the owner gave up what was settled: newer weights are")
        self.given_up.clear()

    def _set_aside(self, paths: Iterable[Path], why: str) -> None:
        for path in checkpoint_file.set_aside(paths):
            self.notify("set_aside", f"{why} now {path}")

    def first_weights(self, snapshots: Snapshots) -> Weights | None:
        """Return the weights that the run starts from, as round -1. They are drawn from the run's seed, or
        are those of a given model. None if the model is not here yet, or the owner ordered a return to later
        weights."""
        if self.lineage.era:
            return None
        if not self.signed.manifest.init_checkpoint.path:
            return Weights(self.part.first_units(), settled_round=-1, chain=START, tokens=0)
        return snapshots.start.weights() if snapshots.start is not None else None

    @property
    def lost_round(self) -> int:
        """The newest round in the names of the damaged files; -1 if a file is usable or none exists."""
        return max(self.damaged.values(), default=-1) if self.saved is None else -1

    async def save_forever(self, seconds: float, snapshots: Snapshots) -> None:
        """Write the newest suitable snapshot about every `seconds`, in the same rounds as other peers
        (`aligned`), until cancelled. Never writes if `seconds` is 0 or there is no folder."""
        loop = asyncio.get_running_loop()
        if not seconds or self.folder is None:
            await loop.create_future()  # Never completes.
        started, first = loop.time(), snapshots.newest_round()
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, seconds))
            rounds_passed = snapshots.newest_round() - first
            wanted_rounds = seconds * rounds_passed / (loop.time() - started)
            every = aligned(snapshots.rules.snapshot_interval, wanted_rounds)
            for snapshot in snapshots.held:
                if (snapshot.root.round + 1) % every == 0:
                    await self._write(snapshot.weights())
                    break

    async def save(self, settled: Callable[[], Weights]) -> None:
        """Write the settled weights that `settled` returns, unless a file has them or newer ones. `settled`
        is called in the compute thread, and this waits for it."""
        if self.folder is not None:
            await self._write(await computed(self.compute, settled), last=True)

    async def save_newest(self, snapshots: Snapshots) -> None:
        """Write the newest snapshot, unless a file has it or a newer one."""
        if snapshots.held:
            await self._write(snapshots.held[0].weights(), last=True)

    async def save_target(self, snapshots: Snapshots, lineage: Lineage) -> None:
        """Write the snapshot with which a new era begins, if it is in memory, and set newer checkpoints
        aside. The next worker begins with it, and serves it to others."""
        for snapshot in snapshots.held:
            if (snapshot.root.round, snapshot.root.digest) == lineage.target:
                self.forget_after(snapshot.root.round)
                await self._write(snapshot.weights(), last=True)

    async def _write(self, weights: Weights, last: bool = False) -> None:
        """Write the weights in a thread. Does nothing for initial weights (round -1), if a usable file is of
        this round or a newer one, or if a damaged file is of this round. A failure is reported at most once
        in `REFUSED_SECONDS`, but always if `last`: there is no further attempt."""
        round = weights.settled_round
        saved_round = self.saved[1] if self.saved is not None else -1
        if self.folder is None or round < 0 or saved_round >= round:
            return
        manifest = self.signed.manifest
        if round in self.damaged.values():
            return  # A checkpoint of this round would replace the damaged file.
        try:
            path = await asyncio.to_thread(
                checkpoint_file.write,
                self.folder,
                manifest,
                self.stage,
                round,
                weights.chain,
                weights.units,
                self.part.state,
                self.digests.of_round(round),
                self.past(round),
                weights.tokens,
                self.damaged,
            )
        except checkpoint_file.DiskError as error:
            now = asyncio.get_running_loop().time()
            if last or now >= self._report_again_at:
                self._report_again_at = now + REFUSED_SECONDS
                self.notify("checkpoint_failed", f"{error}; training goes on, the older checkpoint is intact")
            return
        self.saved = path, round
        self.log_event(log_events.Saved(round=round, bytes=path.stat().st_size))
        self._report_again_at = 0.0
        self.notify("checkpoint", f"saved the weights of round {round} in {path}")
