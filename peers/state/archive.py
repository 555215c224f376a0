"""The contents of an archive of a run, and the checks that it is complete.

    run.json           the published run
    order.bin          the owner's newest order, if one was given
    moderated-order.bin  the moderators' newest bans, if there are any
    contributors.json  the contributors, by what peers claim in their records and by the receipts in these
    archive.json       the index: every checkpoint with its SHA-256, length and signers
    stage-S-round-R.safetensors

An archive is a folder or bucket to which an archivist copies checkpoints: weights after a settled round, with
signatures of peers. A file is used only if it has the hash in the index. `generate`, `export` and `evaluate`
can read an archive folder directly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from peers.config.run_file import RunFileError, SignedManifest, from_published, published_text
from peers.config.run_url import MAX_BYTES
from peers.state.archive_store import ArchiveError, Store, sha256
from protocols.signed.moderation import MODERATED
from swarmnet.identifiers import RunId

INDEX, RUN, CONTRIBUTORS = "archive.json", "run.json", "contributors.json"
ORDER, MODERATED_ORDER = "order.bin", "moderated-order.bin"
FORMAT = 1
GIVEN_UP = ".given-up"
"""Suffix of checkpoints of a history that was given up."""
INDEX_LIMIT = 64 * 1024 * 1024
"""Maximum size of the index in bytes, for readers and writers: an entry that 64 peers signed takes 4 KB."""
_LIMIT = 1 << 63
"""A bound above any length in bytes and any time in seconds."""
_NAME_PATTERN = re.compile(r"stage-(\d{1,5})-round-(\d{8,10})\.safetensors")


class IndexFull(ArchiveError):
    """The index would exceed the size that readers accept if one more checkpoint were added."""


@dataclass(frozen=True, slots=True)
class ArchivedCheckpoint:
    """One archived checkpoint."""

    name: str
    stage: int
    round: int
    bytes: int
    sha256: str
    signers: tuple[str, ...]
    """Peers that signed these weights."""
    archived: float
    """Time of archiving in swarm time, seconds since 1970."""
    tokens: int | None = None
    """Number of tokens in all settled rounds up to this one; None if not known."""


class Archive:
    """An archive in a store. Its methods block: call them from a thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.entries: tuple[ArchivedCheckpoint, ...] = ()

    def open(self, signed: SignedManifest | None = None) -> SignedManifest:
        """Read the index into `entries`, and return the manifest of the archive's run. `signed` is the
        manifest of the expected run, and is written to an empty archive; None: any run. Raises ArchiveError
        if the archive is of another run, or if it is empty and `signed` is None."""
        run_file = self.store.read(RUN, MAX_BYTES)
        if run_file is None:
            if signed is None:
                raise ArchiveError(f"{self.store.url} is no archive of a run: it has no {RUN}")
            self.store.write(RUN, published_text(signed).encode())
            return signed
        try:
            archived_run = from_published(run_file, f"{self.store.url}/{RUN}")
        except RunFileError as error:
            raise ArchiveError(str(error)) from None
        if signed is not None and archived_run.run_id != signed.run_id:
            raise ArchiveError(
                f"{self.store.url} is the archive of the run {archived_run.run_id}, not of {signed.run_id}; "
                "name another place"
            )
        self.entries = self._read_index(archived_run.run_id)
        return archived_run

    def newest(self, stage: int) -> list[ArchivedCheckpoint]:
        """Return the checkpoints of a stage, newest first."""
        of_stage = [entry for entry in self.entries if entry.stage == stage]
        return sorted(of_stage, key=lambda entry: -entry.round)

    def checkpoint(self, entry: ArchivedCheckpoint) -> bytes:
        """Return the bytes of a checkpoint. Raises ArchiveError if they do not match the index."""
        data = self.store.read(entry.name, entry.bytes)
        if data is None:
            raise ArchiveError(f"{self.store.url}/{entry.name} is missing, though the index names it")
        if len(data) != entry.bytes or sha256(data) != entry.sha256:
            raise ArchiveError(f"{self.store.url}/{entry.name} is damaged: it has not the hash of the index")
        return data

    def put(self, entry: ArchivedCheckpoint, data: bytes) -> None:
        """Write a checkpoint and then the index with its entry. Raises IndexFull, and then writes no file, or
        UserError if the store refuses."""
        entries = (*(e for e in self.entries if e.name != entry.name), entry)
        index = self._encode_index(entries)
        self.store.write(entry.name, data)
        self._write_index(entries, index)

    def prune(self, interval_rounds: int, newest: int, every: int) -> list[ArchivedCheckpoint]:
        """Delete old checkpoints, and return their entries. The `newest` ones of each stage stay, and older
        ones at a distance of `every` times `interval_rounds` rounds (`kept`). The index is written first, so
        that it never names a deleted file."""
        staying: list[ArchivedCheckpoint] = []
        for stage in {entry.stage for entry in self.entries}:
            entries = self.newest(stage)
            rounds = kept([entry.round for entry in entries], interval_rounds, newest, every)
            staying += [entry for entry in entries if entry.round in rounds]
        names = {entry.name for entry in staying}
        deleted = [entry for entry in self.entries if entry.name not in names]
        if deleted:
            self._write_index(tuple(staying), self._encode_index(tuple(staying)))
            for entry in deleted:
                self.store.delete(entry.name)
        return deleted

    def set_aside(self, stage: int, round: int) -> list[ArchivedCheckpoint]:
        """Rename a stage's checkpoints that are newer than `round` to `.given-up`, and return their entries.
        The index is written before the old names are deleted. Raises ArchiveError."""
        newer = [entry for entry in self.newest(stage) if entry.round > round]
        for entry in newer:
            name = entry.name.replace(".safetensors", GIVEN_UP)
            self.store.write(name, self.checkpoint(entry))
        if newer:
            staying = tuple(entry for entry in self.entries if entry not in newer)
            self._write_index(staying, self._encode_index(staying))
        for entry in newer:
            self.store.delete(entry.name)
        return newer

    def damaged(self) -> list[str]:
        """Return the names of checkpoints that do not match the index."""
        return [entry.name for entry in self.entries if self._is_damaged(entry)]

    def _is_damaged(self, entry: ArchivedCheckpoint) -> bool:
        try:
            self.checkpoint(entry)
        except ArchiveError:
            return True
        return False

    def orders(self) -> list[bytes]:
        """Return the stored orders of the owner and the moderators without verification."""
        stored = (self.store.read(name) for name in (ORDER, MODERATED_ORDER))
        return [data for data in stored if data is not None]

    def put_orders(self, orders: Iterable[bytes]) -> None:
        """Write the newest orders: at most one of the owner, and one of the moderators."""
        for data in orders:
            self.store.write(MODERATED_ORDER if data[:1] == bytes([MODERATED]) else ORDER, data)

    def contributors(self) -> list[dict[str, Any]]:
        """Return the archived contributors, a dict each, for example with `peer`, `name` and `tokens` by
        stage. The values are not checked. Returns none if the file is missing or damaged."""
        data = self.store.read(CONTRIBUTORS)
        try:
            content = json.loads(data) if data else []
        except (ValueError, RecursionError):
            return []
        if not isinstance(content, list):
            return []
        return [entry for entry in content if isinstance(entry, dict)]

    def put_contributors(self, contributors: list[dict[str, Any]]) -> None:
        self.store.write(CONTRIBUTORS, json.dumps(contributors, indent=1, ensure_ascii=False).encode())

    def _encode_index(self, entries: tuple[ArchivedCheckpoint, ...]) -> bytes:
        """Return an index of these entries as JSON. Raises IndexFull if it is too large for readers."""
        # Tokens are stored separately, because earlier programs refuse entries with more fields.
        tokens = {entry.name: entry.tokens for entry in entries if entry.tokens is not None}
        checkpoints = [{k: v for k, v in asdict(entry).items() if k != "tokens"} for entry in entries]
        content = {"format": FORMAT, "checkpoints": checkpoints, "tokens": tokens}
        data = json.dumps(content, indent=1).encode()
        if len(data) > INDEX_LIMIT:
            raise IndexFull(
                f"{self.store.url}/{INDEX} is full: {len(entries)} checkpoints take {len(data)} bytes, of at "
                f"most {INDEX_LIMIT}; what is archived stays, but nothing is added: keep fewer "
                "(archiving.newest, archiving.every) or archive to another place"
            )
        return data

    def _write_index(self, entries: tuple[ArchivedCheckpoint, ...], data: bytes) -> None:
        self.store.write(INDEX, data)
        self.entries = entries

    def _read_index(self, run_id: RunId) -> tuple[ArchivedCheckpoint, ...]:
        """Return the index's entries; none if there is no index. Raises ArchiveError if it is invalid."""
        data = self.store.read(INDEX, INDEX_LIMIT)
        if data is None:
            return ()
        try:
            if len(data) > INDEX_LIMIT:
                raise ValueError(f"it has {len(data)} bytes, of at most {INDEX_LIMIT}")
            content = json.loads(data)
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}")
            tokens = dict(content.get("tokens", {}))
            return tuple(_parse_entry(entry, tokens.get(entry["name"])) for entry in content["checkpoints"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            url = self.store.url
            raise ArchiveError(f"{url}/{INDEX} of the run {run_id[:16]} cannot be used: {error}") from None


def entry_name(stage: int, round: int) -> str:
    return f"stage-{stage}-round-{round:08d}.safetensors"


def _parse_entry(content: dict[str, Any], tokens: object) -> ArchivedCheckpoint:
    """Return an entry of the index from its JSON `content` and its number of `tokens`, which is None if
    invalid. Raises ValueError, KeyError or TypeError if the entry is invalid: an archive is not trusted."""
    valid_tokens = tokens if isinstance(tokens, int) and 0 <= tokens < _LIMIT else None
    signers = tuple(map(str, content["signers"]))
    entry = ArchivedCheckpoint(**{**content, "signers": signers, "tokens": valid_tokens})
    named = _NAME_PATTERN.fullmatch(entry.name)
    if named is None or (int(named[1]), int(named[2])) != (entry.stage, entry.round):
        raise ValueError(f"an entry named {entry.name!r}")
    if not (isinstance(entry.bytes, int) and 0 <= entry.bytes < _LIMIT and 0 <= entry.archived < _LIMIT):
        raise ValueError(f"{entry.name} has {entry.bytes} bytes, archived at {entry.archived}")
    return entry


def kept(rounds: Collection[int], interval_rounds: int, newest: int, every: int) -> set[int]:
    """Return which of one stage's archived `rounds` to keep: the `newest` ones, and older ones at a fixed
    distance, which is `every` times `interval_rounds`. It is counted from the run's start, so that all
    archivists keep the same rounds. With `every` 0, no older ones are kept."""
    newest_first = sorted(rounds, reverse=True)
    step = interval_rounds * every
    every_step = {round for round in newest_first if step and (round + 1) % step == 0}
    return set(newest_first[:newest]) | every_step
