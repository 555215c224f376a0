"""Finding the run."""

from __future__ import annotations

import asyncio

from peers.config.peer_file import PeerFile
from peers.config.run_file import SignedManifest, check_wish
from peers.data.local_text import require_text
from peers.network.discovery.bootstrap import find_manifest, manifest_here
from peers.role import Network, Process
from swarmnet.run.manifest import Manifest


async def find_run(process: Process, network: Network) -> SignedManifest:
    """Be in the swarm, and know the run. UserError if the run has not the stage that this peer would hold, or
    the first is asked for without the run's text: before anybody hears of this peer, where the run is on its
    disk."""
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
    check_wish(config.stage, manifest)
    require_text(manifest, config)
