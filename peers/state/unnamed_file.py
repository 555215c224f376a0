"""Bytes that are seldom read, in a file without a name: it goes with the last who reads it, also after a
crash."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile


def laid_down(
    parts: Sequence[bytes | memoryview], folder: Path | None
) -> list[bytes | memoryview]:
    """The same, to be read from one file in `folder`; copies in memory where there is no folder, no room or
    nothing to write."""
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
    except OSError:  # The disk is full, which whoever writes checkpoints says.
        return [bytes(part) for part in parts]
    return [view[start:end] for start, end in zip([0, *ends], ends, strict=False)]
