"""Send requests to a running peer from another process, such as a command.

The peer listens on a Unix socket, the control socket, in its state folder. A request is one JSON line."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.config.atomic_files import is_folder
from peers.config.errors import UserError
from peers.runtime.control_socket import LONGEST_ANSWER_BYTES, SOCKET_NAME, socket_path

_READ_BYTES = 64 * 1024


def ask(state: Path, request: Mapping[str, Any], deadline_seconds: float) -> dict[str, Any]:
    """Send a request to the peer with this state folder and return its answer. Raises UserError, with what to
    do, if no peer runs, it refuses, or it does not answer in time."""
    deadline = time.monotonic() + deadline_seconds
    if not is_folder(state):
        raise UserError(
            f"{state}: no such folder; name the state folder of a peer, its peer file, or leave it out"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(max(0.001, deadline_seconds))
            with socket_path(state) as path:
                connection.connect(path)
            connection.sendall(json.dumps(dict(request)).encode() + b"\n")
            line = _read_line(connection, deadline)
        except (FileNotFoundError, ConnectionRefusedError):
            raise UserError(
                f"no peer runs with the state folder {state}; start it with `swarmnet run PEER.yaml` or "
                "`swarmnet join RUN`, or name the folder of one that runs"
            ) from None
        except PermissionError:
            raise UserError(f"{state / SOCKET_NAME}: it belongs to another user; ask as that user") from None
        except TimeoutError:
            raise UserError(
                f"the peer of {state} did not answer within {deadline_seconds:g} s; "
                "if it stays so, stop it (Ctrl+C or SIGTERM) and start it again"
            ) from None
        except OSError as error:
            raise UserError(f"the peer of {state} cannot be asked: {error.strerror or error}") from None
    return _decode_answer(line, state)


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """Read up to the end of a line. `deadline` is in seconds of the monotonic clock. Raises OSError if the
    peer closes the connection or the line is too long, and TimeoutError."""
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        part = connection.recv(_READ_BYTES)
        size += len(part)
        if not part or size > LONGEST_ANSWER_BYTES:
            raise ConnectionError("it ended the conversation without an answer")
        parts.append(part)
    return b"".join(parts)


def _decode_answer(line: bytes, state: Path) -> dict[str, Any]:
    """Return the answer in this line. Raises UserError if it reports an error or is no JSON object."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise UserError(f"the peer of {state} answered with something else than an object: another version?")
    if "error" in answer:
        raise UserError(str(answer["error"]))
    return answer


def runs(state: Path) -> bool:
    """Return True if a peer listens on the control socket of this state folder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            with socket_path(state) as path:
                connection.connect(path)
        except (OSError, UserError):
            return False
    return True
