"""Keep what each peer has contributed over a restart of the observer, in its state folder."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.network.discovery.claimed_tokens import Contributions
from swarmnet.identifiers import RunId

FILE_NAME = "contributors.json"


def encode(run: RunId, contributions: Contributions) -> bytes:
    """Return the content of the file: the contributions to the run."""
    return json.dumps({"run": run, "contributors": list(contributions.entries())}).encode()


def keep(state: Path, content: bytes) -> None:
    """Write the file. Errors are ignored: the page works without it."""
    with contextlib.suppress(UserError):
        write_atomically(state / FILE_NAME, content)


def restore(state: Path, run: RunId, contributions: Contributions) -> None:
    """Add the stored contributions. A missing or invalid file, or one of another run, changes nothing."""
    try:
        stored = json.loads((state / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(stored, dict) or stored.get("run") != run:
        return
    entries = stored.get("contributors")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            contributions.restore(entry)
