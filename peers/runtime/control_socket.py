"""The path of the control socket, shortened if it exceeds the limit of Unix sockets."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from peers.config.errors import UserError

SOCKET_NAME = "control.sock"
LONGEST_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""sun_path has 108 bytes on Linux and 104 on BSD and macOS, one of them for the terminating zero."""
LINE_BYTES = 64 * 1024
"""Maximum bytes of a request; an answer may be longer (`LONGEST_ANSWER_BYTES`)."""
LONGEST_ANSWER_BYTES = 4 * 1024 * 1024


@contextlib.contextmanager
def socket_path(state: Path) -> Iterator[str]:
    """Yield a path of this state folder's socket that is short enough to bind or connect to within the
    context. Raises UserError if there is none, and OSError if the folder cannot be opened."""
    path = str((state / SOCKET_NAME).absolute())
    if len(os.fsencode(path)) <= LONGEST_PATH_BYTES:
        yield path
        return
    if not Path("/proc/self/fd").is_dir():
        raise UserError(
            f"{path} is longer than the {LONGEST_PATH_BYTES} bytes that a Unix socket's path may have; "
            "give this peer a state folder with a shorter path (key `state`)"
        )
    folder = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET_NAME}"
    finally:
        os.close(folder)
