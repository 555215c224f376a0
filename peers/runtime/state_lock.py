"""Protect a state folder: other users cannot read it, and its peer locks it while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from peers.config.errors import UserError

_LOCK_NAME = "lock"
_ADVICE = "give this peer another state folder: --state FOLDER of `join`, key `state` in a peer file"


@contextlib.contextmanager
def lock_state_folder(state: Path, role: str = "", to_the_end: bool = False) -> Iterator[bool]:
    """Hold the lock of a state folder, because two peers with one identity would contradict each other.
    Yields True if other users had access to the folder before. Raises UserError if another peer holds the
    lock. With `to_the_end`, the lock is held until the process ends, not only until the end of the context.
    The lock file names the peer's `role`, so that commands can choose between the peers of a machine."""
    was_open = make_private(state)
    with _open_lock_file(state) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{state} is used by another running peer; each needs its own state") from None
        except OSError as error:
            raise UserError(f"{state}: cannot be locked: {error.strerror}; {_ADVICE}") from None
        file.truncate(0)
        file.write(role)
        file.flush()
        if to_the_end:
            os.dup(file.fileno())  # Never closed: a lock is held until its last descriptor is closed.
        yield was_open


def make_private(state: Path) -> bool:
    """Create the folder, or remove other users' access: it has event logs, addresses of peers and weights.
    Returns True if others had access until now. A folder of another user, or one that all may write to, is
    left as it is. Raises UserError."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = state.stat()
        is_foreign = status.st_uid != os.geteuid()  # Then its mode cannot be changed.
        is_shared = bool(status.st_mode & stat.S_ISVTX)  # As /tmp is; then its mode must not be changed.
        is_private = not status.st_mode & 0o077
        if is_foreign or is_shared or is_private:
            return False
        state.chmod(stat.S_IMODE(status.st_mode) & 0o700)
    except OSError as error:
        raise UserError(f"{state}: cannot be written: {error.strerror}; {_ADVICE}") from None
    return True


def _open_lock_file(state: Path) -> TextIO:
    """Open the lock file, the first file that a peer writes. Raises UserError."""
    try:
        return (state / _LOCK_NAME).open("a")  # "w" would empty the file of the peer that holds the lock.
    except OSError as error:
        raise UserError(f"{state}: cannot be written: {error.strerror}; {_ADVICE}") from None


def is_held(state: Path) -> bool:
    """Return True if a running peer holds the lock of this state folder. Creates nothing. Raises UserError if
    the lock file cannot be read."""
    try:
        with (state / _LOCK_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise UserError(f"{state}: {error.strerror}; ask as the user who runs the peer") from None
    return False


def role_of(state: Path) -> str:
    """Return the role of the peer that locked this folder last; empty if none is known."""
    try:
        return (state / _LOCK_NAME).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
