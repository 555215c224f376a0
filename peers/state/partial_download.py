"""The chunks of a download, on disk until it is done: a peer that is restarted meanwhile goes on from there.

A chunk is a file named by its hash, so it counts for every state in which it occurs. Only those of the newest
download are kept. Nothing is synced to the disk: what is read counts only if it has the hash, and what is
lost or damaged is fetched again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from peers.telemetry.events import Say
from protocols.messages.table import SnapshotRoot
from swarmnet.snapshots.digest_votes import Root
from swarmnet.snapshots.fetch import chunk_bytes, worth_resuming

_HASH_DIGITS = 64
_UNFINISHED = ".part"


class KeptChunks:
    """The folder of a peer's newest download, of which nobody else writes. `folder` None keeps nothing."""

    def __init__(self, folder: Path | None, say: Say) -> None:
        self.folder = folder
        self.say = say
        self._said = False

    async def worth_resuming(self, roots: Iterable[SnapshotRoot]) -> set[Root]:
        """Those of which so much is on disk that they are better than newer ones. By the files' sizes: where
        these are damaged, more is fetched in the end."""
        if self.folder is None:
            return set()
        sizes = await asyncio.to_thread(_sizes, self.folder)
        return {
            (root.round, root.digest)
            for root in roots
            if worth_resuming(sum(sizes.get(hash, 0) for hash in root.chunks), root.size)
        }

    async def remove(self) -> None:
        """The download is done, or not wanted any more."""
        if self.folder is not None:
            await asyncio.to_thread(_remove, self.folder)

    def refused(self, error: OSError) -> None:
        """The disk refuses a chunk: it is said once."""
        if not self._said:
            self._said = True
            why = f"{self.folder}: cannot be written: {error.strerror or error}"
            then = "what comes from now on is fetched again if this peer is restarted meanwhile"
            self.say("chunks_not_kept", f"{why}; the download goes on in memory, but {then}; make room there")


class Download:
    """One state on its way: its bytes in memory, and its chunks on disk. Files are read and written in
    threads; all else is called on the event loop."""

    def __init__(self, kept: KeptChunks, hashes: Sequence[bytes], size: int) -> None:
        """`hashes`: the SHA-256 of every chunk; `size`: of the state, in bytes."""
        self.hashes = hashes
        self.data = bytearray(size)
        self._kept = kept
        self._parts = memoryview(self.data)
        self._chunk_bytes = chunk_bytes(size)
        self._waiting: list[int] = []
        self._writing: asyncio.Task[None] | None = None
        self._has_folder = False
        """The folder is there, and holds nothing but chunks of this state."""
        self._ended = kept.folder is None

    def part(self, index: int) -> memoryview:
        """The place of a chunk in `data`."""
        return self._parts[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]

    async def resume(self) -> set[int]:
        """Take over the chunks that are on disk, and remove those that are damaged; which are here now."""
        if self._kept.folder is None:
            return set()
        return await asyncio.to_thread(self._read, self._kept.folder)

    def put(self, index: int, chunk: bytes) -> None:
        """A chunk came that has its hash and length."""
        self.part(index)[:] = chunk

    def keep(self, index: int) -> None:
        """Write a chunk that is here to disk, soon."""
        if self._ended:
            return
        self._waiting.append(index)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write(), name="keep chunks")

    async def close(self) -> None:
        """Nothing more is written; what is on disk stays there."""
        self._ended = True
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        """What waits is indices: however slow the disk is, it takes no memory."""
        folder = self._kept.folder
        while self._waiting and not self._ended and folder is not None:
            indices, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._write_all, folder, indices)
            except OSError as error:
                self._ended = True
                self._kept.refused(error)

    # -- in a thread ----------------------------------------------------------------------------------

    def _read(self, folder: Path) -> set[int]:
        sizes, found = _sizes(folder), set()
        for index, hash in enumerate(self.hashes):
            if hash not in sizes:
                continue
            if _holds(folder / hash.hex(), hash, self.part(index)):
                found.add(index)
            else:
                with suppress(OSError):
                    (folder / hash.hex()).unlink()
        return found

    def _write_all(self, folder: Path, indices: Sequence[int]) -> None:
        """Raises OSError where the disk refuses."""
        if not self._has_folder:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_others(folder, {hash.hex() for hash in self.hashes})
            self._has_folder = True
        for index in indices:
            if self._ended:
                return
            path = folder / self.hashes[index].hex()
            if not path.exists():
                _write(path, self.part(index))


def _write(path: Path, chunk: memoryview) -> None:
    """Not synced, but under its name only when it is whole. Raises OSError, and leaves nothing then."""
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        unfinished.write_bytes(chunk)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _holds(path: Path, hash: bytes, place: memoryview) -> bool:
    """Read a file into `place`; whether it is of just that length and has the hash."""
    try:
        with path.open("rb") as file:
            whole = file.readinto(place) == len(place) and not file.read(1)
    except OSError:
        return False
    return whole and hashlib.sha256(place).digest() == hash


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Nothing if the folder is not there or cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _sizes(folder: Path) -> dict[bytes, int]:
    """The bytes of each chunk's file, by the chunk's hash. No content is looked at."""
    found = {}
    for entry in _entries(folder):
        with suppress(OSError, ValueError):
            if len(entry.name) == _HASH_DIGITS and entry.is_file(follow_symlinks=False):
                found[bytes.fromhex(entry.name)] = entry.stat(follow_symlinks=False).st_size
    return found


def _remove_others(folder: Path, names: set[str]) -> None:
    """Leave only plain files of these names."""
    for entry in list(_entries(folder)):
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name not in names or not entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def _remove(folder: Path) -> None:
    """With all that is in it, as far as the disk allows."""
    _remove_others(folder, set())
    with suppress(OSError):
        folder.rmdir()
