"""Keep the chunks of a download on disk until it is complete, so that a restarted peer can resume it.

A state is a stage's weights, which a joining peer downloads in chunks of equal size. Its root lists the
hashes of the chunks. A chunk's file is named by the chunk's hash, so it serves every state that contains it.
Only chunks of the newest download are kept. A chunk whose file is damaged is fetched again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from peers.telemetry.log_events import Notify
from protocols.messages.table import SnapshotRoot
from swarmnet.snapshots.digest_votes import Root
from swarmnet.snapshots.fetch import chunk_bytes, worth_resuming

_HASH_DIGITS = 64
_UNFINISHED = ".part"


class KeptChunks:
    """The folder of a peer's newest download; only this peer writes there. None keeps nothing."""

    def __init__(self, folder: Path | None, notify: Notify) -> None:
        self.folder = folder
        self.notify = notify
        self._reported = False

    async def worth_resuming(self, roots: Iterable[SnapshotRoot]) -> set[Root]:
        """Return (round, digest) of the states in `roots` that are worth resuming: enough of their chunks are
        on disk. Only file sizes are compared: damaged files are detected later and fetched again."""
        if self.folder is None:
            return set()
        sizes = await asyncio.to_thread(_sizes, self.folder)
        return {
            (root.round, root.digest)
            for root in roots
            if worth_resuming(sum(sizes.get(hash, 0) for hash in root.chunks), root.size)
        }

    async def remove(self) -> None:
        """Remove the chunks. Called when the download is complete or no longer wanted."""
        if self.folder is not None:
            await asyncio.to_thread(_remove, self.folder)

    def refused(self, error: OSError) -> None:
        """Report to the user that the disk refuses a chunk; only the first call does so."""
        if not self._reported:
            self._reported = True
            problem = f"{self.folder}: cannot be written: {error.strerror or error}"
            effect = "what comes from now on is fetched again if this peer is restarted meanwhile"
            self.notify(
                "chunks_not_kept", f"{problem}; the download goes on in memory, but {effect}; make room there"
            )


class Download:
    """One state that is being downloaded: its bytes in memory, and its chunks on disk. Files are read and
    written in threads. Everything else is called on the event loop."""

    def __init__(self, kept: KeptChunks, hashes: Sequence[bytes], size: int) -> None:
        """Create the download. `hashes` has the SHA-256 of every chunk; `size` is the state's in bytes."""
        self.hashes = hashes
        self.data = bytearray(size)
        self._kept = kept
        self._parts = memoryview(self.data)
        self._chunk_bytes = chunk_bytes(size)
        self._unwritten: list[int] = []
        """Indices of loaded chunks that are not on disk yet."""
        self._writing: asyncio.Task[None] | None = None
        self._has_folder = False
        """True if the folder exists and contains only chunks of this state."""
        self._ended = kept.folder is None

    def part(self, index: int) -> memoryview:
        """Return the place of a chunk in `data`."""
        return self._parts[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]

    async def resume(self) -> set[int]:
        """Load the chunks on disk, remove damaged ones, and return the indices of the loaded chunks."""
        if self._kept.folder is None:
            return set()
        return await asyncio.to_thread(self._load_chunks, self._kept.folder)

    def put(self, index: int, chunk: bytes) -> None:
        """Store a received chunk whose hash and length have been checked."""
        self.part(index)[:] = chunk

    def keep(self, index: int) -> None:
        """Schedule a loaded chunk for writing to disk."""
        if self._ended:
            return
        self._unwritten.append(index)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_pending(), name="keep chunks")

    async def close(self) -> None:
        """Stop writing; files on disk stay there."""
        self._ended = True
        if self._writing is not None:
            await self._writing

    async def _write_pending(self) -> None:
        """Write the chunks in `_unwritten` until none is left. If the disk refuses, report it and stop."""
        folder = self._kept.folder
        while self._unwritten and not self._ended and folder is not None:
            indices = self._unwritten
            self._unwritten = []
            try:
                await asyncio.to_thread(self._write_all, folder, indices)
            except OSError as error:
                self._ended = True
                self._kept.refused(error)

    # -- in a thread ----------------------------------------------------------------------------------

    def _load_chunks(self, folder: Path) -> set[int]:
        """Load the chunks of this state from disk, and delete damaged ones. Returns the loaded indices."""
        on_disk, loaded = _sizes(folder), set()
        for index, hash in enumerate(self.hashes):
            if hash not in on_disk:
                continue
            if _read_chunk(folder / hash.hex(), hash, self.part(index)):
                loaded.add(index)
            else:
                with suppress(OSError):
                    (folder / hash.hex()).unlink()
        return loaded

    def _write_all(self, folder: Path, indices: Sequence[int]) -> None:
        """Write these chunks unless their files exist. The first call creates the folder and removes files of
        other states from it. Raises OSError if the disk refuses."""
        if not self._has_folder:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_others(folder, {hash.hex() for hash in self.hashes})
            self._has_folder = True
        for index in indices:
            if self._ended:
                return
            path = folder / self.hashes[index].hex()
            if not path.exists():
                _write_chunk(path, self.part(index))


def _write_chunk(path: Path, chunk: memoryview) -> None:
    """Write a chunk; its file gets the final name when complete. Raises OSError, and then leaves no file."""
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        unfinished.write_bytes(chunk)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _read_chunk(path: Path, hash: bytes, buffer: memoryview) -> bool:
    """Read a file into `buffer`. Returns True if it has exactly the buffer's length and this SHA-256."""
    try:
        with path.open("rb") as file:
            has_length = file.readinto(buffer) == len(buffer) and not file.read(1)
    except OSError:
        return False
    return has_length and hashlib.sha256(buffer).digest() == hash


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; none if it does not exist or cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _sizes(folder: Path) -> dict[bytes, int]:
    """Return the size in bytes of each chunk's file by the chunk's hash. No content is read."""
    sizes = {}
    for entry in _entries(folder):
        with suppress(OSError, ValueError):
            if len(entry.name) == _HASH_DIGITS and entry.is_file(follow_symlinks=False):
                sizes[bytes.fromhex(entry.name)] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove everything in a folder except plain files with these names, as far as the disk allows."""
    for entry in list(_entries(folder)):
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name not in names or not entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def _remove(folder: Path) -> None:
    """Remove the folder with its contents, as far as the disk allows."""
    _remove_others(folder, set())
    with suppress(OSError):
        folder.rmdir()
