"""The run's text in an archive, for newcomers that find no peer with it.

    text.json         the SHA-256 of each file, and its size in bytes
    text/SHA256-N     part N of a file: shards, indexes, the tokenizer and the chat template

A reader knows the hash that it wants from the run's manifest, or from an index that the manifest names. An
archive can therefore leave a file out, but not change it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from peers.state.archive_store import ArchiveError, Store
from peers.state.chunks.file_download import FREE_BYTES, DiskFull

INDEX = "text.json"
PART_BYTES = 32 * 2**20
"""Bytes of a file that are in memory at a time."""


class ArchivedText:
    """The text in a store. Its methods block: call them from a thread."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, files: Mapping[str, Path]) -> None:
        """Add the files that are not there yet, by their SHA-256, but none that changed on this disk. Raises
        UserError if the store refuses, and OSError for a file that cannot be read."""
        sizes = self._sizes()
        for sha256, path in files.items():
            if sha256 in sizes or not path.is_file():
                continue
            size, digest = 0, hashlib.sha256()
            with path.open("rb") as opened:
                while part := opened.read(PART_BYTES):
                    self.store.write(_part_name(sha256, size // PART_BYTES), part)
                    digest.update(part)
                    size += len(part)
            if digest.hexdigest() == sha256:
                sizes[sha256] = size
                self._write(sizes)  # Last, so that it names only whole files.
            else:
                self._delete(sha256, size)

    def withdraw(self, withdrawn: Collection[bytes]) -> None:
        """Delete the files with these SHA-256. Raises UserError."""
        sizes = self._sizes()
        gone = [sha256 for sha256 in sizes if bytes.fromhex(sha256) in withdrawn]
        if gone:
            self._write({sha256: size for sha256, size in sizes.items() if sha256 not in gone})
        for sha256 in gone:
            self._delete(sha256, sizes[sha256])

    def fetch(self, sha256: str, path: Path, longest: int) -> int:
        """Write the file with this SHA-256, of at most `longest` bytes, to `path`. Returns its bytes; 0 if it
        is not there. Raises ArchiveError if it is damaged or the store does not answer, and OSError."""
        size = self._sizes().get(sha256, 0)
        if not 0 < size <= longest:
            return 0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < size + FREE_BYTES:
            raise DiskFull(f"{path.parent}: has no room for {size:,} bytes of text: make room there")
        temporary, digest = path.with_name(f"{path.name}.archive.part"), hashlib.sha256()
        try:
            with temporary.open("wb") as opened:
                for number in range(_part_count(size)):
                    part = self.store.read(_part_name(sha256, number), PART_BYTES) or b""
                    digest.update(part)
                    opened.write(part)
            if digest.hexdigest() != sha256:
                raise ArchiveError(f"{self.store.url}: the text {sha256[:16]}... is damaged")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return size

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by its SHA-256. Raises ArchiveError."""
        data = self.store.read(INDEX)
        try:
            sizes = msgspec.json.decode(data, type=dict[str, int]) if data else {}
            if any(len(bytes.fromhex(sha256)) != 32 for sha256 in sizes):
                raise ValueError("it names a file by no SHA-256")
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"{self.store.url}/{INDEX} cannot be used: {error}") from None
        return sizes

    def _delete(self, sha256: str, size: int) -> None:
        for number in range(_part_count(size)):
            self.store.delete(_part_name(sha256, number))

    def _write(self, sizes: Mapping[str, int]) -> None:
        self.store.write(INDEX, msgspec.json.encode(sizes))


def _part_name(sha256: str, number: int) -> str:
    return f"text/{sha256}-{number}"


def _part_count(size: int) -> int:
    return -(-size // PART_BYTES)
