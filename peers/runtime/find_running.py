"""Find the peer that a command means: by a state folder, a peer file, or the only peer on this machine.

A state folder holds a peer's identity, logs and checkpoints. A peer file is the peer's configuration."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from peers.config.atomic_files import is_file, is_folder
from peers.config.errors import UserError
from peers.config.peer_file import default_state, load
from peers.runtime.state_lock import is_held, role_of

PEER_FILE = "peer.yaml"
"""Name of the peer file that `swarmnet join` writes into the state folder."""
HOSTED = "hosted"
"""Folder in the state home with links to the peers of a running `swarmnet host`, which are elsewhere."""
OF_A_PEER = (PEER_FILE, "identity.key")
"""Files that identify a folder as a peer's state."""


def state_of(where: Path | None, command: str, at_rest: bool = False) -> Path:
    """Return the state folder that the user means. `command` is the text typed after `swarmnet`. With
    `at_rest`, the only existing peer is also found if it does not run. Raises UserError that says what to
    type instead."""
    if where is None:
        return _find_only_peer(command, at_rest)
    if is_folder(where):
        return where
    if is_file(where):
        return load(where, os.environ).state
    raise UserError(f"{where}: no such folder or file; name a peer's state folder or its peer file")


def peer_file_of(where: Path | None, command: str) -> Path:
    """Return the peer file that the user means. `where` is that file or its state folder; None means the only
    peer, running or not. Raises UserError if there is no such file, or several peers."""
    if where is not None and not is_folder(where):
        return where
    folder = where if where is not None else state_of(None, command, at_rest=True)
    file = folder / PEER_FILE
    if not is_file(file):
        raise UserError(
            f"{folder}: there is no {PEER_FILE} in it; name the file that its peer was started with, as in: "
            f"swarmnet {command} PEER.yaml"
        )
    return file


def running_here() -> list[Path]:
    """Return the state folders of this user's running peers, in the system's default place or hosted."""
    home = default_state(os.environ, sys.platform)
    hosted = (path.resolve() for path in (home / HOSTED).glob("*/"))
    return sorted(path for path in (*home.glob("*/"), *hosted) if _is_running(path))


def states_here() -> list[Path]:
    """Return the state folders of this user's peers in the system's default place, running or not. A folder
    that contains another user's files must be named explicitly."""
    home = default_state(os.environ, sys.platform)
    return sorted(path for path in home.glob("*/") if any((path / name).is_file() for name in OF_A_PEER))


def _find_only_peer(command: str, at_rest: bool) -> Path:
    """Return the state folder of the only running peer. If several run, return that of the only worker among
    them. If none runs and `at_rest` is set, return that of the only peer that exists. Raises UserError if
    there is none, or more than one; `command` is part of its text."""
    running = running_here()
    workers = [state for state in running if role_of(state) == "worker"]
    for candidates in (running, workers):
        if len(candidates) == 1:
            return candidates[0]
    stopped = states_here() if at_rest and not running else []
    if len(stopped) == 1:
        return stopped[0]
    if stopped:
        names = ", ".join(str(path) for path in stopped)
        raise UserError(f"no peer runs, and there are states of several; name one: {names}")
    if not running:
        raise UserError(
            f"no peer seems to run below {default_state(os.environ, sys.platform)}; name its state folder or "
            f"its peer file, as in: swarmnet {command} FOLDER"
        )
    names = ", ".join(str(path) for path in running)
    raise UserError(f"several peers run here; name the state folder of one: {names}")


def _is_running(state: Path) -> bool:
    """Return True if a peer holds the lock. A socket proves nothing: a killed peer leaves it."""
    try:
        return is_held(state)
    except UserError:  # The folder belongs to another user, and has to be named.
        return False
