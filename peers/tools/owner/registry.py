"""The registry: listed runs, each with the manifest that proves it."""

from __future__ import annotations

import asyncio
from random import Random

from peers.config.run_file import RunFileError, SignedManifest, from_wire
from protocols.errors import WireError
from protocols.ports import Directory
from swarmnet.identifiers import RunId

LOOK_SECONDS = 15.0
AT_ONCE = 16


async def runs(directory: Directory, limit: int, chance: Random) -> tuple[list[SignedManifest], int]:
    """Return at most `limit` listed runs whose manifests are found, by name, and the number of entries. From
    more entries a random part is taken, since entries cost their authors nothing. Raises WireError if the
    directory does not answer."""
    entries = await directory.listings(LOOK_SECONDS)
    chosen = entries if len(entries) <= limit else chance.sample(entries, limit)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(run_id: RunId) -> SignedManifest | None:
        async with room:
            return await manifest(directory, run_id)

    found = await asyncio.gather(*(one(run_id) for run_id in chosen))
    listed = [signed for signed in found if signed is not None and signed.manifest.listed]
    return sorted(listed, key=lambda signed: (signed.manifest.name, signed.run_id)), len(entries)


async def manifest(directory: Directory, run_id: RunId) -> SignedManifest | None:
    """Return the manifest of a run; None if no peer has it or it is invalid."""
    try:
        data = await directory.get_manifest(run_id, LOOK_SECONDS)
        return from_wire(data, run_id) if data is not None else None
    except (WireError, RunFileError):
        return None
