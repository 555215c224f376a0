"""Join a run with a throw-away identity, for commands that only inspect it or request inference."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from peers.config.errors import NoAnswer
from peers.config.run_file import SignedManifest
from peers.network.discovery.bootstrap import PeerCache, find_manifest, join_directory
from peers.telemetry.log_events import Notify
from protocols.daemon.p2pd import LOOPBACK, DaemonOptions
from protocols.daemon.temporary import prefix
from protocols.dht.directory import DhtDirectory
from protocols.p2pd.transport import P2pdTransport
from protocols.reachability.relay_client import circuits_through
from protocols.signed.identity import load_or_create

FIND_SECONDS = 60.0
"""Timeout for a bootstrap to answer and the manifest to arrive."""
LOOK = "is the address right? swarmnet doctor --run RUN --bootstrap ADDRESS"
"""The hint for the user after this timeout."""


@dataclass(frozen=True, slots=True)
class RunConnection:
    """A run that was found, and the connection to it."""

    signed: SignedManifest
    transport: P2pdTransport
    directory: DhtDirectory


@asynccontextmanager
async def visit_run(
    run: str, bootstraps: Sequence[str], cache: PeerCache, notify: Notify
) -> AsyncIterator[RunConnection]:
    """Join the directory, find a run's manifest, and yield it with the transport and the directory, which are
    closed at the end. `run` is a run id or a published file; `cache` has more addresses to try. Raises
    NoAnswer if no peer answers or has the manifest in time, and RunFileError for an invalid file."""
    async with join_as_visitor(bootstraps, cache, notify) as (transport, directory):
        with tempfile.TemporaryDirectory(prefix=prefix("visitor")) as folder:
            try:
                async with asyncio.timeout(FIND_SECONDS):
                    signed = await find_manifest(run, directory, Path(folder) / "run.json", notify)
            except TimeoutError:
                raise NoAnswer(f"the run was not found within {FIND_SECONDS:g} s; {LOOK}") from None
        yield RunConnection(signed, transport, directory)


@asynccontextmanager
async def join_as_visitor(
    bootstraps: Sequence[str], cache: PeerCache, notify: Notify
) -> AsyncIterator[tuple[P2pdTransport, DhtDirectory]]:
    """Start p2pd (the libp2p daemon) with a throw-away identity and join the directory (the DHT). Yields
    both, and stops them at the end. Raises NoAnswer if no peer answers in time."""
    with tempfile.TemporaryDirectory(prefix=prefix("visitor")) as folder:
        key_file = Path(folder) / "identity.key"
        load_or_create(key_file)
        transport = await P2pdTransport.start(key_file, _options([*bootstraps, *cache.read()]))
        directory = None
        try:
            circuits = circuits_through(bootstraps)
            directory = await DhtDirectory.start(transport.daemon, stores=False, ways=circuits)
            try:
                async with asyncio.timeout(FIND_SECONDS):
                    await join_directory(directory, bootstraps, cache, notify)
            except TimeoutError:
                raise NoAnswer(f"no peer answered within {FIND_SECONDS:g} s; {LOOK}") from None
            yield transport, directory
        finally:
            if directory is not None:
                await directory.close()
            await transport.close()


def _options(addresses: Sequence[str]) -> DaemonOptions:
    """Return the options of a p2pd that only dials: no port at a router, but able to use relays."""
    if all("/127.0.0.1/" in address for address in addresses):
        return LOOPBACK
    return DaemonOptions(auto_nat=False, nat_port_map=False)
