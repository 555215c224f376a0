"""The newest record of every peer of a run, from the directory."""

from __future__ import annotations

import asyncio

from protocols.errors import WireError
from protocols.records import SignedRecord, open_record
from protocols.transport import Directory
from swarmnet.identifiers import PeerId, RunId
from swarmnet.manifest import Manifest

LOOK_UP_SECONDS = 10.0
"""Deadline of one look-up (as in presence.py)."""


async def look(directory: Directory, run: RunId, manifest: Manifest) -> dict[PeerId, SignedRecord]:
    """The newest record of every peer. Raises WireError when the directory does not answer."""
    stages = range(-1, len(manifest.stages))
    found = await asyncio.gather(*(directory.look_up(run, stage, LOOK_UP_SECONDS) for stage in stages))
    newest: dict[PeerId, SignedRecord] = {}
    for data in (data for records in found for data in records.values()):
        try:
            signed = open_record(data, run)
        except WireError:  # The gate lets none in; a directory without one might.
            continue
        known = newest.get(signed.peer)
        if known is None or known.sequence < signed.sequence:
            newest[signed.peer] = signed
    return newest
