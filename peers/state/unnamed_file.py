"""Move rarely read bytes to an unnamed file, which the system deletes with its last reader."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile


def store_unnamed(parts: Sequence[bytes | memoryview], folder: Path | None) -> list[bytes | memoryview]:
    """Store these parts one after another in one unnamed file in `folder`, and return a memory-mapped view of
    each part. If `folder` is None, the disk refuses, or all parts are empty, return copies in memory."""
    ends = list(accumulate(map(len, parts)))
    if folder is None or not ends or not ends[-1]:
        return [bytes(part) for part in parts]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            for part in parts:
                file.write(part)
            file.flush()
            view = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
    except OSError:  # The disk is full, for example; the writer of checkpoints reports that.
        return [bytes(part) for part in parts]
    return [view[start:end] for start, end in zip([0, *ends], ends, strict=False)]
