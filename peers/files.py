"""Writing files so that a crash leaves either the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from peers.errors import UserError


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, sync, and rename over it. Raises UserError where the disk refuses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
