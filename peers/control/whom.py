"""Which peer a command means: a state folder, a peer file, or the only one that runs here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from peers.config.peer_file import default_state, load
from peers.control.socket_path import SOCKET_NAME
from peers.errors import UserError


def state_of(where: Path | None) -> Path:
    """The state folder that a person means. Raises UserError, with what to type instead."""
    if where is None:
        return _only_one(default_state(os.environ, sys.platform))
    if where.is_dir():
        return where
    if where.is_file():
        return load(where, os.environ).state
    raise UserError(f"{where}: no such folder or file; name a peer's state folder or its peer file")


def _only_one(home: Path) -> Path:
    running = sorted(path.parent for path in home.glob(f"*/{SOCKET_NAME}"))
    if len(running) == 1:
        return running[0]
    if not running:
        raise UserError(
            f"no peer seems to run below {home}; name its state folder or its peer file, "
            "as in: swarmnet me FOLDER"
        )
    names = ", ".join(str(path) for path in running)
    raise UserError(f"several peers run here; name the state folder of one: {names}")
