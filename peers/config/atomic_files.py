"""Files: what is at a path; and writing that leaves either the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from peers.errors import UserError

_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP, errno.ENAMETOOLONG}
"""A name that no file can have (a long text where a path belongs) is as good as one that none has."""

_OTHERS = "name another path, or ask as the user whose it is"


def is_file(path: Path) -> bool:
    """As Path.is_file, which raises in a folder of another user. Raises UserError there."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """See `is_file`."""
    return stat.S_ISDIR(_mode(path))


def is_there(path: Path) -> bool:
    """See `is_file`; whatever it is."""
    return _mode(path) != 0


def require_free(folder: Path, option: str) -> None:
    """Nothing, or an empty folder. Raises UserError, which names the option that said it."""
    if not is_there(folder):
        return
    if not is_folder(folder):
        raise UserError(f"{folder} is no folder; name a new one with {option}")
    try:
        empty = not any(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder}: cannot be looked into: {error.strerror}; {_OTHERS}") from None
    if not empty:
        raise UserError(f"{folder} is not empty; name a new folder with {option}")


def _mode(path: Path) -> int:
    """What stands there; 0: nothing."""
    try:
        return path.stat().st_mode
    except ValueError:  # A zero byte in it.
        return 0
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return 0
        raise UserError(f"{path}: cannot be looked at: {error.strerror}; {_OTHERS}") from None


def write_atomically(path: Path, data: bytes, private: bool = False) -> None:
    """Write beside `path`, sync, and rename over it; `private`: for nobody else to read. Raises UserError
    where the disk refuses."""
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
