"""The bootstrap role: it lets peers find each other, and keeps a run's manifest in the directory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from importlib.metadata import version

from peers.config.run_file import SignedManifest
from peers.errors import UserError
from peers.network.dht_sampler import RelayObserver
from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.discovery.bootstrap import find_manifest
from peers.network.discovery.claims import Claims, plain_name
from peers.network.discovery.height import HighestFinalizedRound
from peers.network.discovery.record_reader import look
from peers.network.orders.order_book import OrderBook
from peers.network.orders.republish import keep
from peers.role import Network, Process, Role
from peers.telemetry import events as events
from peers.telemetry.console import StatusLine
from protocols.errors import WireError
from protocols.signed.peer_record import NO_STAGE

MANIFEST_SECONDS = 60.0
"""Seconds after which a bootstrap with a run stores its manifest, the owner's order and the registry entry
again. They expire after 600 s in the directory."""
HEIGHT_SECONDS = 30.0
"""Seconds between two looks at the run's progress."""
LOOK_SECONDS = 5.0
"""Seconds between two reports of the known nodes and the relayed traffic."""


class Bootstrap(Role):
    """The role `bootstrap`."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def run(self, network: Network) -> None:
        """Join the swarm and serve it until cancelled."""
        process, directory = self.process, network.directory
        await network.join(process)
        signed = None
        if process.config.run is not None:
            kept = process.config.state / "run.json"
            signed = await find_manifest(process.config.run, directory, kept, process.notify)
            self._tell_how_to_join(signed, network.ways_in[0])
        process.known_as(signed.run_id if signed is not None else "")
        book = None
        if signed is not None:
            book = OrderBook(signed, process.config.state / "order.bin", process.log.record, process.notify)
        circuits = RelayObserver(network.transport.circuits, process.metrics)
        remembering = None
        if signed is not None:
            remembering = asyncio.create_task(self._remember(network, signed), name="height")
        try:
            await self._stay(network, signed, book, circuits)
        finally:
            circuits.end()
            if remembering is not None:
                remembering.cancel()
                await asyncio.gather(remembering, return_exceptions=True)

    async def _remember(self, network: Network, signed: SignedManifest) -> None:
        """Follow the run's highest settled round. Announce it in an own record while no peer trains the
        run."""
        process, directory = self.process, network.directory
        height = HighestFinalizedRound(process.config.state / "height.json")
        log_event = process.log.record
        presence = RecordAnnouncer(
            signed, process.identity, network.transport, directory, version("swarmnet"), log_event
        )
        while True:
            try:
                records = await look(directory, signed.run_id, len(signed.manifest.stages))
                height.saw(records.values(), directory.now())
                if not height.trained and height.round >= 0:
                    claims = Claims(
                        "serving", plain_name(process.config.name), "bootstrap", settled=height.round
                    )
                    record = presence.record(NO_STAGE, claims)
                    await directory.announce(signed.run_id, NO_STAGE, record, 10.0)
            except WireError as error:
                log_event(events.LookUpFailed(what="height", code=error.code, reason=str(error)))
            except UserError as error:  # A full disk: the round is kept in memory until a restart.
                process.notify("height_not_kept", str(error))
            await asyncio.sleep(HEIGHT_SECONDS)

    async def _stay(
        self, network: Network, signed: SignedManifest | None, book: OrderBook | None, circuits: RelayObserver
    ) -> None:
        """Keep the run's manifest and orders in the directory, and log the traffic of circuits, until
        cancelled. `signed` is None for a bootstrap that serves no particular run."""
        process, directory = self.process, network.directory
        put_at, carried = float("-inf"), 0
        while True:
            if signed is not None and time.monotonic() >= put_at + MANIFEST_SECONDS:
                put_at = time.monotonic()
                with contextlib.suppress(WireError):
                    await directory.put_manifest(signed.run_id, signed.wire(), 10.0)
                if book is not None:
                    await keep(book, directory, process.log.record)
            process.report.status(StatusLine("bootstrap", swarm_peers=network.dht.known_nodes))
            circuits.look()
            carries = network.transport.circuits
            if carries.carried_bytes != carried:
                carried = carries.carried_bytes
                process.log.record(events.Circuits(open=carries.circuits, slots=carries.slots, bytes=carried))
            process.log.flush()
            await asyncio.sleep(LOOK_SECONDS)

    def _tell_how_to_join(self, signed: SignedManifest, address: str) -> None:
        name, run = signed.manifest.name, signed.run_id
        text = f"run {name}: others join with: swarmnet join {run} --bootstrap {address}"
        self.process.notify("run", text)
