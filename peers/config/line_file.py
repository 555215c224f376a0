"""What is known of a peer's own line: what its limits allow, and what `swarmnet doctor` measured last."""

from __future__ import annotations

import contextlib
import json
from math import inf
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.peer_file import PeerFile
from peers.errors import UserError
from swarmnet.resources.link_bandwidth import LinkBandwidth

FILE_NAME = "line.json"
"""In the state folder."""


def keep(state: Path, line: LinkBandwidth) -> None:
    """What was just measured, for a peer that has a folder. Where it cannot be written it is forgotten."""
    if not state.is_dir():
        return
    with contextlib.suppress(UserError, OSError):
        write_atomically(state / FILE_NAME, json.dumps({"up": line.up, "down": line.down}).encode())


def known_line(config: PeerFile) -> LinkBandwidth:
    """Nobody may send more than its limit, whatever was measured."""
    measured = _measured(config.state)
    return LinkBandwidth(min(config.limits.upload or inf, measured.up), measured.down)


def _measured(state: Path) -> LinkBandwidth:
    """A file that is not there, or was tampered with, says nothing."""
    try:
        kept = json.loads((state / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return LinkBandwidth()
    up, down = (kept.get(key) if isinstance(kept, dict) else None for key in ("up", "down"))
    return LinkBandwidth(_rate(up), _rate(down))


def _rate(value: object) -> float:
    if isinstance(value, int | float) and 1 <= value < 2**62:
        return float(value)
    return inf
