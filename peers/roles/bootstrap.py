"""The bootstrap: lets others find each other, and keeps a run's manifest findable."""

from __future__ import annotations

import asyncio
import contextlib
import time

from peers.creator.order_book import OrderBook
from peers.creator.upkeep import keep
from peers.joining import find_manifest
from peers.relay_observer import RelayObserver
from peers.roles.role import Network, Process, Role
from peers.run_file import SignedManifest
from peers.status import Status
from protocols.errors import WireError

MANIFEST_SECONDS = 60.0
"""How often a bootstrap with a run stores its manifest, the owner's order and the registry's entry again;
they live 600 s in the directory."""
LOOK_SECONDS = 5.0
"""How often a bootstrap says how many nodes it knows, and what it carries."""


class Bootstrap(Role):
    """Role `bootstrap`."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def run(self, network: Network) -> None:
        """Until it is cancelled."""
        process, directory = self.process, network.directory
        await network.join(process)
        signed = None
        if process.config.run is not None:
            kept = process.config.state / "run.json"
            signed = await find_manifest(process.config.run, directory, kept, process.say)
            self._tell_how_to_join(signed, network.ways_in[0])
        process.known_as(signed.run_id if signed is not None else "")
        book = None
        if signed is not None:
            book = OrderBook(signed, process.config.state / "order.bin", process.log.record, process.say)
        circuits = RelayObserver(network.transport.circuits, process.metrics)
        try:
            await self._stay(network, signed, book, circuits)
        finally:
            circuits.end()

    async def _stay(
        self, network: Network, signed: SignedManifest | None, book: OrderBook | None, circuits: RelayObserver
    ) -> None:
        process, directory = self.process, network.directory
        put_at, carried = float("-inf"), 0
        while True:
            if signed is not None and time.monotonic() >= put_at + MANIFEST_SECONDS:
                put_at = time.monotonic()
                with contextlib.suppress(WireError):
                    await directory.put_manifest(signed.run_id, signed.wire(), 10.0)
                if book is not None:
                    await keep(book, directory, process.log.record)
            process.report.status(Status("bootstrap", swarm_peers=network.dht.known_nodes))
            circuits.look()
            carries = network.transport.circuits
            if carries.carried_bytes != carried:
                carried = carries.carried_bytes
                process.log.record("circuits", open=carries.circuits, slots=carries.slots, bytes=carried)
            process.log.flush()
            await asyncio.sleep(LOOK_SECONDS)

    def _tell_how_to_join(self, signed: SignedManifest, address: str) -> None:
        name, run = signed.manifest.name, signed.run_id
        told = f"run {name}: others join with: swarmnet join {run} --bootstrap {address}"
        self.process.say("run", told)
