"""Finding the run and the stages to hold, alone or for all siblings of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from importlib.metadata import version
from random import Random

from peers.compute.siblings import Found, Siblings
from peers.config.line_file import known_line
from peers.config.peer_file import PeerFile
from peers.config.run_file import SignedManifest, check_wish
from peers.data.local_text import require_text
from peers.network.discovery.announcer import Presence
from peers.network.discovery.bootstrap import find_manifest, join_directory, manifest_here
from peers.role import Network, Process
from peers.worker.stage_moves import first_stages
from swarmnet.run.manifest import Manifest


async def find_run(process: Process, network: Network) -> SignedManifest:
    """Be in the swarm, and know the run. A sibling joins through the first peer of its process. UserError if
    the run has not the stages that this process would hold, or the first is asked for without the run's text:
    before anybody hears of this peer, where the run is on its disk."""
    config, siblings = process.config, process.siblings
    assert config.run is not None, "checked by PeerFile"
    if siblings is not None and process.number > 0:
        found = await siblings.found()
        ways = [*found.ways_in, *config.bootstrap]
        await join_directory(network.directory, ways, network.cache, process.say)
        return found.signed
    kept = config.state / "run.json"
    here = await asyncio.to_thread(manifest_here, config.run, kept)
    if here is not None:
        await asyncio.to_thread(_check, config, here.manifest)
    await network.join(process)
    signed = here or await find_manifest(config.run, network.directory, kept, process.say)
    if here is None:
        await asyncio.to_thread(_check, config, signed.manifest)
    if siblings is not None:
        daemon = network.transport.daemon  # Its own addresses: no sibling needs a relay to it.
        siblings.lead(Found(signed, [f"{way}/p2p/{daemon.peer}" for way in daemon.addresses]))
    return signed


def _check(config: PeerFile, manifest: Manifest) -> None:
    check_wish(config.stage, config.stages, manifest)
    require_text(manifest, config)


def own_processes(process: Process, network: Network) -> Callable[[], Collection[int]]:
    """The p2pds whose work is this peer's: the first of several siblings watches the machine for all."""
    if process.siblings is None:
        return lambda: (network.transport.daemon.pid,)
    process.siblings.daemons[process.number] = network.transport.daemon.pid
    return process.siblings.own_processes


async def choose(
    process: Process, siblings: Siblings, signed: SignedManifest, network: Network,
    fits: Callable[[Manifest, range], object], never: frozenset[int],
) -> range:  # fmt: skip
    """The adjacent stages that this process holds. The first peer says it, once it begins; the others wait
    for that. `fits` raises UserError if they need too much memory; stages in `never` are not chosen."""
    if process.number == 0 and siblings.stages_held is None:
        wish = process.config.stage
        if wish == "auto":
            presence = Presence(
                signed, process.identity, network.transport, network.directory, version("swarmnet"),
                process.log.record,
            )  # fmt: skip
            chance = Random(process.identity.peer_id)
            line = known_line(process.config)
            held = await first_stages(presence, siblings.stages, chance, process.say, never, line)
        else:
            held = range(wish, wish + siblings.stages)
        fits(signed.manifest, held)
        siblings.hold(held)
    return await siblings.held()
