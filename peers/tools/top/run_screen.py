"""Draw snapshots until a key ends it; without a terminal print one frame.

This module imports neither torch nor the network, so that it starts at once.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from peers.runtime.control_client import ask
from peers.telemetry.snapshot import SwarmSnapshot, from_json
from peers.tools.top import screen
from peers.tools.top.keys import Keys

FRAME_SECONDS = 0.25
PEER_SECONDS = 1.0
"""Seconds between two requests to a running peer, which updates its status as often."""
ANSWER_SECONDS = 10.0
"""Timeout of an answer of the peer on this machine."""
LEAVE = "q leaves"


def peer(console: Console, state: Path) -> None:
    """Show the peer that runs with this state folder. Raises UserError if none answers."""
    snapshot = _request_picture(state)
    if not console.is_terminal:
        console.print(screen.frame(snapshot, console))
        return
    with Keys() as keys, live(console) as display:
        asked_at = time.monotonic()
        while "q" not in keys.pressed(FRAME_SECONDS):
            if time.monotonic() >= asked_at + PEER_SECONDS:
                snapshot = _request_picture(state)
                asked_at = time.monotonic()
            display.update(framed(snapshot, console, LEAVE), refresh=True)


def _request_picture(state: Path) -> SwarmSnapshot:
    return from_json(ask(state, {"do": "status"}, ANSWER_SECONDS))


def live(console: Console) -> Live:
    """Return a full-screen display. The terminal is restored at the end."""
    return Live(console=console, screen=True, auto_refresh=False)


def framed(snapshot: SwarmSnapshot, console: Console, foot: str) -> Group:
    """Return a snapshot that fits the current size of the terminal."""
    return screen.frame(snapshot, console, foot, console.height - 1)
