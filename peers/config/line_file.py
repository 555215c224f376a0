"""Store the bandwidth of this machine's internet connection, as last measured by `swarmnet doctor`."""

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
"""Name of the file in the state folder."""


def keep(state: Path, line: LinkBandwidth) -> None:
    """Save a measurement if the peer has a state folder. Errors are ignored."""
    if not state.is_dir():
        return
    with contextlib.suppress(UserError, OSError):
        write_atomically(state / FILE_NAME, json.dumps({"up": line.up, "down": line.down}).encode())


def known_bandwidth(config: PeerFile) -> LinkBandwidth:
    """Return the measured bandwidth, with the upload limited to `limits.upload`."""
    measured = _measured(config.state)
    return LinkBandwidth(min(config.limits.upload or inf, measured.up), measured.down)


def _measured(state: Path) -> LinkBandwidth:
    """Return the saved bandwidth; unlimited if the file is missing or invalid."""
    try:
        kept = json.loads((state / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return LinkBandwidth()
    up, down = (kept.get(key) if isinstance(kept, dict) else None for key in ("up", "down"))
    return LinkBandwidth(_rate(up), _rate(down))


def _rate(value: object) -> float:
    """Return a valid rate in bytes per second, or infinity."""
    if isinstance(value, int | float) and 1 <= value < 2**62:
        return float(value)
    return inf
