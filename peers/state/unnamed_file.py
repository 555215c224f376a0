"""Store rarely read bytes in an unnamed file, which vanishes with its last reader, even after a crash."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile


def laid_down(parts: Sequence[bytes | memoryview], folder: Path | None) -> list[bytes | memoryview]:
    """Store these parts in one file in `folder` and return views of them. Returns copies in memory if there
    is no folder, no space, or nothing to write."""
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
    except OSError:  # The disk is full; the writer of checkpoints reports it.
        return [bytes(part) for part in parts]
    return [view[start:end] for start, end in zip([0, *ends], ends, strict=False)]
