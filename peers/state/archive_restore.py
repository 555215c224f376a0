"""Start from an archive: copy its newest checkpoint of a stage into the worker's folder, if it is newer.

An archive is a folder or a URL with copies of a run's checkpoints. A checkpoint is checked before use: hash
in the index, run, stage, shapes, and digest of the weights. At least one peer must have signed that digest,
but the archive's author could have invented this peer. A user who names an archive thus trusts it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from peers.config.remote_files import retry_until_reached
from peers.config.run_file import SignedManifest
from peers.config.run_url import without_secret
from peers.state import checkpoint_file
from peers.state.archive import Archive, ArchivedCheckpoint
from peers.state.archive_store import ArchiveError, StoreUnreachable, open_store
from peers.state.checkpoint_file import STATEMENT_BYTES, Checkpoint, CheckpointError
from peers.telemetry.console import counted
from peers.telemetry.log_events import Notify
from protocols.errors import WireError
from protocols.signed.envelope import EnvelopeKind, open_envelope
from swarmnet.identifiers import PeerId
from swarmnet.lineage import NO_RETURN, Lineage
from swarmnet.model.flat_layout import Layout
from swarmnet.rounds.own_contributions import NOTHING_PAST


def signers(checkpoint: Checkpoint) -> set[PeerId]:
    """Return the peers that signed exactly these weights, by the valid signatures in the checkpoint."""
    signing_peers = set()
    for data in checkpoint.signed:
        try:
            envelope = open_envelope(data, checkpoint.run_id, EnvelopeKind.SETTLED, STATEMENT_BYTES)
        except WireError:
            continue
        has_digest = bytes(envelope.payload) == checkpoint.chain + checkpoint.digest
        is_of_round = (envelope.stage, envelope.round) == (checkpoint.stage, checkpoint.round)
        if has_digest and is_of_round:
            signing_peers.add(envelope.sender)
    return signing_peers


class Restoring:
    """Copies a checkpoint from an archive. Call `bring` before a worker reads its own disk."""

    def __init__(
        self, url: str, signed: SignedManifest, notify: Notify, lineage: Lineage = NO_RETURN
    ) -> None:
        self.lineage = lineage
        self.url = without_secret(url)
        self._secret_url = url
        self.signed = signed
        self.notify = notify
        self.orders: list[bytes] = []
        """The archive's orders, not verified, once it was read."""

    async def bring(
        self,
        folder: Path,
        stage: int,
        layout: Layout,
        trained: Callable[[], bool] = lambda: False,
        damaged: Collection[Path] = (),
    ) -> None:
        """Copy the archive's newest usable checkpoint of a stage into `folder`, if it is newer than the files
        there that are not in `damaged`. If the archive has none of this stage, only the user is notified.

        An archive that does not answer is tried again, because starting from the seed would create a second
        branch. Attempts end when `trained` returns True: a peer trains this stage. Raises ArchiveError if the
        archive cannot be read."""

        async def attempt() -> None:
            if not trained():
                self.notify(
                    "archive", await asyncio.to_thread(self._copy_newest, folder, stage, layout, damaged)
                )

        await retry_until_reached(attempt, StoreUnreachable, partial(self.notify, "archive"))

    def _copy_newest(self, folder: Path, stage: int, layout: Layout, damaged: Collection[Path]) -> str:
        """Copy the archive's newest usable checkpoint of the stage into `folder`, unless a file there is as
        new. Returns a message for the user, also if the archive has no checkpoint of the stage. Raises
        ArchiveError if it has some and none is usable."""
        archive = Archive(open_store(self._secret_url))
        archive.open(self.signed)
        self.orders = archive.orders()
        files = [file for file in checkpoint_file.files(folder, stage) if file not in damaged]
        own_round = int(files[0].stem.rpartition("-")[2]) if files else -1
        entries = archive.newest(stage)
        problems = []
        for entry in entries:
            if entry.round <= own_round:
                return f"the own checkpoint, of round {own_round}, is as new as the archive's"
            try:
                signing_peers = self._copy_checked(archive, entry, folder, layout)
            except (ArchiveError, CheckpointError) as error:
                problems.append(str(error))
                continue
            peers = counted(len(signing_peers), "peer")
            return f"took the weights of round {entry.round} from {self.url}, signed by {peers}"
        if problems:
            raise ArchiveError(f"no checkpoint of stage {stage} in {self.url} can be used: {problems[0]}")
        return f"{self.url} has no checkpoint of stage {stage}"

    def _copy_checked(
        self, archive: Archive, entry: ArchivedCheckpoint, folder: Path, layout: Layout
    ) -> set[PeerId]:
        """Copy a checkpoint from the archive into `folder`, and return the peers that signed its weights.

        The file is checked under a temporary name and then renamed. Raises ArchiveError or CheckpointError if
        it is refused."""
        data = archive.checkpoint(entry)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{entry.name}.{os.getpid()}.part"
        try:
            temporary.write_bytes(data)
            checkpoint, _ = checkpoint_file.restore_signed(
                temporary, self.signed.run_id, entry.stage, layout, max_tensors=len(layout.entries)
            )
            signing_peers = signers(checkpoint)
            if checkpoint.round != entry.round or not signing_peers:
                raise ArchiveError(f"{archive.store.url}/{entry.name}: no peer has signed its weights")
            if not self.lineage.admits((checkpoint.round, checkpoint.digest), checkpoint.chain):
                raise ArchiveError(f"{archive.store.url}/{entry.name}: the run's owner gave it up")
            # A peer's own checkpoint may name settled sets of contributions; no signature covers these.
            if checkpoint.past != NOTHING_PAST:
                raise ArchiveError(
                    f"{archive.store.url}/{entry.name}: names settled sets without a signature"
                )
            temporary.replace(folder / entry.name)
        except OSError as error:
            raise ArchiveError(f"{folder}: cannot be written: {error.strerror}") from None
        finally:
            temporary.unlink(missing_ok=True)
        return signing_peers
