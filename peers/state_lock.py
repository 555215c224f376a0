"""The lock on a state folder, which its peer holds as long as it lives."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from peers.errors import UserError

_NAME = "lock"
_ANOTHER = "give this peer another state folder (key `state`, or --state of `join`)"


@contextlib.contextmanager
def only_one(state: Path) -> Iterator[None]:
    """Hold the lock: two peers with one identity would be one liar. UserError if another peer holds it."""
    with _opened(state) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{state} is used by another running peer; each needs its own state") from None
        except OSError as error:
            raise UserError(f"{state}: cannot be locked: {error.strerror}; {_ANOTHER}") from None
        yield


def _opened(state: Path) -> TextIO:
    """Makes the folder too: it is the first thing that a peer writes. Raises UserError."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        return (state / _NAME).open("w")
    except OSError as error:
        raise UserError(f"{state}: cannot be written: {error.strerror}; {_ANOTHER}") from None


def is_held(state: Path) -> bool:
    """Whether a peer lives in this state folder; nothing is made."""
    try:
        with (state / _NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise UserError(f"{state}: {error.strerror}; ask as the user who runs the peer") from None
    return False
