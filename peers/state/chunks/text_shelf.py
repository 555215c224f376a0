"""Send the run's text to other peers: files that the manifest's indexes list, the indexes, and the tokenizer.

A chunk is sent only if it has the hash that the index implies, so that a file that changed on this disk is
not sent. Withdrawn files are not on the shelf.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from peers.data.shards import chunk_list
from peers.data.shared_text import SharedFile
from swarmnet.snapshots.fetch import chunk_bytes

BLOB_CHUNK_BYTES = 2**20
"""Bytes per chunk of an index, a tokenizer or a list of hashes: their hash is known, but not their size."""
READ_AT_ONCE = 2
"""Chunks that are read from disk at a time, so that other work of this process gets threads, too."""
LISTS_KEPT = 64
"""Lists of hashes in memory, of at most 29 kB each. Another one is made again: its file is read for it."""
HASH_BYTES = 32


class TextShelf:
    """What this peer can send. `find` is given to the transport."""

    def __init__(self) -> None:
        self.served_bytes = 0
        self._blobs: dict[bytes, Path] = {}
        self._files: dict[bytes, SharedFile] = {}
        self._by_list: dict[bytes, SharedFile] = {}
        self._lists: OrderedDict[bytes, bytes] = OrderedDict()
        self._reading = asyncio.Semaphore(READ_AT_ONCE)

    def replace(self, files: Iterable[SharedFile], blobs: Mapping[bytes, Path]) -> None:
        """Send these files and blobs from now on, and no others. They may not be on disk yet."""
        self._files = {file.sha256: file for file in files}
        self._by_list = {file.chunks: file for file in self._files.values()}
        self._blobs = dict(blobs)

    def paths(self) -> dict[str, Path]:
        """Return where each file and blob is, by its SHA-256. It may not be on disk yet."""
        files = {file.sha256.hex(): file.path for file in self._files.values()}
        return {digest.hex(): path for digest, path in self._blobs.items()} | files

    async def find(self, digest: bytes, index: int) -> bytes | None:
        """Return chunk `index` of the file, the list of hashes or the blob with this SHA-256; None if it is
        not here or differs."""
        if digest not in self._blobs and digest not in self._files and digest not in self._by_list:
            return None
        async with self._reading:
            try:
                chunk = await asyncio.to_thread(self._read, digest, index)
            except OSError:
                return None
        self.served_bytes += len(chunk or b"")
        return chunk

    # -- in a thread ----------------------------------------------------------------------------------

    def _read(self, digest: bytes, index: int) -> bytes | None:
        """Return the chunk, or None. Raises OSError."""
        if digest in self._blobs:
            return _part(self._blobs[digest], index, BLOB_CHUNK_BYTES)
        listed = self._by_list.get(digest)
        if listed is not None:
            return self._hashes(listed) if index == 0 else None
        file = self._files.get(digest)
        hashes = None if file is None else self._hashes(file)
        if file is None or hashes is None:
            return None
        chunk = _part(file.path, index, chunk_bytes(file.size))
        expected = hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        return chunk if hashlib.sha256(chunk).digest() == expected else None

    def _hashes(self, file: SharedFile) -> bytes | None:
        """Return the hashes of a file's chunks; None if they are not those of the index."""
        hashes = self._lists.get(file.chunks)
        if hashes is None:
            with file.path.open("rb") as opened:
                hashes = chunk_list(opened, file.size)
            if hashlib.sha256(hashes).digest() != file.chunks:
                return None
            self._lists[file.chunks] = hashes
            if len(self._lists) > LISTS_KEPT:
                self._lists.popitem(last=False)
        return hashes


def _part(path: Path, index: int, size: int) -> bytes:
    """Return `size` bytes of a file from byte `index * size` on, or fewer at its end. Raises OSError."""
    with path.open("rb") as opened:
        opened.seek(index * size)
        return opened.read(size)
