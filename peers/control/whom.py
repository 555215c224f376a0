"""Which peer a command means: a state folder, a peer file, or the only one that runs here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from peers.config.peer_file import default_state, load
from peers.errors import UserError
from peers.files import is_file, is_folder
from peers.state_lock import is_held


def state_of(where: Path | None) -> Path:
    """The state folder that a person means. Raises UserError, with what to type instead."""
    if where is None:
        return _only_one(default_state(os.environ, sys.platform))
    if is_folder(where):
        return where
    if is_file(where):
        return load(where, os.environ).state
    raise UserError(f"{where}: no such folder or file; name a peer's state folder or its peer file")


def _only_one(home: Path) -> Path:
    running = sorted(path for path in home.glob("*/") if _lives(path))
    if len(running) == 1:
        return running[0]
    if not running:
        raise UserError(
            f"no peer seems to run below {home}; name its state folder or its peer file, "
            "as in: swarmnet me FOLDER"
        )
    names = ", ".join(str(path) for path in running)
    raise UserError(f"several peers run here; name the state folder of one: {names}")


def _lives(state: Path) -> bool:
    """By the lock: a peer that was killed leaves its socket behind."""
    try:
        return is_held(state)
    except UserError:  # Another user's: it has to be named.
        return False
