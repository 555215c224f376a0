"""Test what is at a path, and write files so that a crash leaves the old or the new content, never a
mixture."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from peers.config.errors import UserError

_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP, errno.ENAMETOOLONG}
"""System errors that mean that no file can exist at a path, such as a name that is too long."""

_ACCESS_HINT = "name another path, or ask as the user whose it is"


def is_file(path: Path) -> bool:
    """Return whether `path` is a file. Raises UserError if a folder on the way cannot be read."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder. Raises UserError if a folder on the way cannot be read."""
    return stat.S_ISDIR(_mode(path))


def is_there(path: Path) -> bool:
    """Return whether anything is at `path`. Raises UserError if a folder on the way cannot be read."""
    return _mode(path) != 0


def require_free(folder: Path, option: str) -> None:
    """Raise UserError, which names the command-line option, unless `folder` is absent or empty."""
    if not is_there(folder):
        return
    if not is_folder(folder):
        raise UserError(f"{folder} is no folder; name a new one with {option}")
    try:
        empty = not any(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder}: cannot be looked into: {error.strerror}; {_ACCESS_HINT}") from None
    if not empty:
        raise UserError(f"{folder} is not empty; name a new folder with {option}")


def _mode(path: Path) -> int:
    """Return the `st_mode` of what is at `path`; 0 if nothing. Raises UserError if the system refuses."""
    try:
        return path.stat().st_mode
    except ValueError:  # The path contains a zero byte.
        return 0
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return 0
        raise UserError(f"{path}: cannot be looked at: {error.strerror}; {_ACCESS_HINT}") from None


def write_atomically(path: Path, data: bytes, private: bool = False) -> None:
    """Write a temporary file next to `path`, sync it, and rename it to `path`. `private`: only the owner may
    read it. Raises UserError if the system refuses."""
    if not path.name:
        raise UserError(f"{path}: cannot be written: it is a folder; name a file in it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            if private:
                temporary.chmod(0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
