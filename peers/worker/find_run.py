"""Find the run that this peer is to join."""

from __future__ import annotations

import asyncio

from peers.config.peer_file import PeerFile
from peers.config.run_file import SignedManifest, require_stage
from peers.data.local_text import require_text
from peers.network.discovery.bootstrap import find_manifest, manifest_here
from peers.process.role import Network, Process
from swarmnet.run.manifest import Manifest


async def find_run(process: Process, network: Network) -> SignedManifest:
    """Join the swarm and return the run's signed manifest.

    Raises UserError if the run does not have the requested stage, or if stage 0 is requested without the
    run's text. If the manifest is on disk, this is checked before any other peer learns of this one."""
    config = process.config
    assert config.run is not None, "checked by PeerFile"
    kept = config.state / "run.json"
    here = await asyncio.to_thread(manifest_here, config.run, kept)
    if here is not None:
        await asyncio.to_thread(_check, config, here.manifest)
    await network.join(process)
    if here is not None:
        return here
    signed = await find_manifest(config.run, network.directory, kept, process.notify)
    await asyncio.to_thread(_check, config, signed.manifest)
    return signed


def _check(config: PeerFile, manifest: Manifest) -> None:
    require_stage(config.stage, manifest)
    require_text(manifest, config)
