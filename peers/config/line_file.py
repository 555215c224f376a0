"""Store the bandwidth of this machine's internet connection, in bytes per second, as last measured by
`swarmnet doctor`. A peer reads it at its next start."""

from __future__ import annotations

import contextlib
import json
from math import inf
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.peer_file import PeerFile
from swarmnet.resources.link_bandwidth import LinkBandwidth

FILE_NAME = "line.json"
"""Name of the file in the state folder."""


def keep(state: Path, line: LinkBandwidth) -> None:
    """Write the measured bandwidth `line` into the state folder, if the folder exists. Errors are ignored."""
    if not state.is_dir():
        return
    with contextlib.suppress(UserError, OSError):
        write_atomically(state / FILE_NAME, json.dumps({"up": line.up, "down": line.down}).encode())


def known_bandwidth(config: PeerFile) -> LinkBandwidth:
    """Return the measured bandwidth, with the upload limited to `limits.upload`."""
    measured = _load_measured(config.state)
    return LinkBandwidth(min(config.limits.upload or inf, measured.up), measured.down)


def _load_measured(state: Path) -> LinkBandwidth:
    """Return the saved bandwidth; unlimited if the file is missing or invalid."""
    try:
        saved = json.loads((state / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return LinkBandwidth()
    if not isinstance(saved, dict):
        return LinkBandwidth()
    return LinkBandwidth(_valid_rate(saved.get("up")), _valid_rate(saved.get("down")))


def _valid_rate(value: object) -> float:
    """Return `value` if it is a possible rate in bytes per second, else infinity."""
    if isinstance(value, int | float) and 1 <= value < 2**62:
        return float(value)
    return inf
