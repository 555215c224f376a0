"""A file that is being downloaded in chunks: written in place, and given its final name when complete."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from peers.data.shared_text import PART
from swarmnet.snapshots.fetch import chunk_bytes

FREE_BYTES = 1 << 30
"""Bytes to leave free on the disk: checkpoints need room next to the text, and the largest have some GB."""


class DiskFull(OSError):
    """The disk has too little room for a file."""


class FileDownload:
    """The chunks of one file on disk. Reads and writes are in threads, all else is on the event loop."""

    def __init__(self, path: Path, hashes: Sequence[bytes], size: int) -> None:
        """`path` is that of the complete file, `hashes` the SHA-256 of each chunk, `size` in bytes."""
        self.hashes = hashes
        self._path = path
        self._part = path.with_name(path.name + PART)
        self._size = size
        self._pending: list[tuple[int, bytes]] = []
        """Chunks that are not on disk yet, with their indices."""
        self._writing: asyncio.Task[None] | None = None

    async def resume(self) -> set[int]:
        """Return the indices of the chunks that are on disk from an earlier attempt. Raises OSError, also if
        the disk has too little room for the rest."""
        return await asyncio.to_thread(self._resume)

    def put(self, index: int, chunk: bytes) -> None:
        """Schedule a correct chunk for writing."""
        self._pending.append((index, chunk))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_pending(), name="write text")

    @property
    def has_failed(self) -> bool:
        """Whether the disk has refused a chunk; `close` raises the error."""
        return self._writing is not None and self._writing.done()

    async def close(self) -> None:
        """Wait until everything is written. Raises OSError."""
        if self._writing is not None:
            await self._writing

    async def finish(self) -> None:
        """Make the complete file durable and give it its final name. Raises OSError."""
        await self.close()
        await asyncio.to_thread(self._finish)

    async def _write_pending(self) -> None:
        while self._pending:
            chunks, self._pending = self._pending, []
            await asyncio.to_thread(self._write, chunks)
        self._writing = None

    # -- in a thread ----------------------------------------------------------------------------------

    def _resume(self) -> set[int]:
        here = set()
        with suppress(FileNotFoundError), self._part.open("rb") as opened:
            for index, expected in enumerate(self.hashes):
                if hashlib.sha256(opened.read(chunk_bytes(self._size))).digest() == expected:
                    here.add(index)
        self._part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        needed = self._size * (len(self.hashes) - len(here)) // max(1, len(self.hashes))
        if shutil.disk_usage(self._part.parent).free < needed + FREE_BYTES:
            raise DiskFull(
                f"{self._part.parent}: has no room for {needed:,} bytes of text and {FREE_BYTES >> 20} MiB "
                "for checkpoints: make room there, or lower max_text_bytes"
            )
        with self._part.open("ab") as opened:
            opened.truncate(self._size)
        return here

    def _write(self, chunks: Sequence[tuple[int, bytes]]) -> None:
        with self._part.open("r+b") as opened:
            for index, chunk in chunks:
                opened.seek(index * chunk_bytes(self._size))
                opened.write(chunk)

    def _finish(self) -> None:
        with self._part.open("r+b") as opened:
            os.fsync(opened.fileno())
        self._part.replace(self._path)
