"""The bootstrap role: let peers find each other, and keep a run's manifest in the directory (the DHT).

A bootstrap is a peer that trains nothing and that others dial first. It may serve one run, or none in
particular. It relays circuits: connections to peers that cannot be dialled directly. The height of a run is
its highest settled round. If all peers that train the run have gone, the bootstrap still announces it."""

from __future__ import annotations

import asyncio
import contextlib
import time

from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.config.run_url import join_command
from peers.network.dht_sampler import RelayObserver
from peers.network.discovery.bootstrap import find_manifest
from peers.network.discovery.claims import Claims, plain_name
from peers.network.discovery.height import HighestFinalizedRound
from peers.network.discovery.record_reader import look
from peers.network.orders.order_book import OrderBook
from peers.network.orders.republish import keep
from peers.process.role import Network, Process, Role
from peers.telemetry import log_events
from peers.telemetry.console import StatusLine
from protocols.errors import WireError
from protocols.signed.peer_record import NO_STAGE

MANIFEST_SECONDS = 60.0
"""Seconds after which a bootstrap with a run stores its manifest, the owner's order and the registry entry
again. They expire after 600 s in the directory."""
HEIGHT_SECONDS = 30.0
"""Seconds between two look-ups of the run's height."""
LOOK_SECONDS = 5.0
"""Seconds between two reports of the known nodes and the relayed traffic."""


class Bootstrap(Role):
    """The role `bootstrap`."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def run(self, network: Network) -> None:
        """Join the swarm and serve it until cancelled. If the peer file names a run, first find its manifest,
        then also follow the run's height in the background."""
        process, directory = self.process, network.directory
        await network.join(process)
        signed = None
        if process.config.run is not None:
            manifest_file = process.config.state / "run.json"
            signed = await find_manifest(process.config.run, directory, manifest_file, process.notify)
            self._notify_how_to_join(signed, network.ways_in[0])
        process.known_as(signed.run_id if signed is not None else "")  # Labels the metrics.
        book = None
        if signed is not None:
            book = OrderBook(
                signed=signed,
                kept=process.config.state / "order.bin",
                log_event=process.log.record,
                notify=process.notify,
            )
        circuits = RelayObserver(network.transport.circuits, process.metrics)
        height_task = None
        if signed is not None:
            height_task = asyncio.create_task(self._follow_height(network, signed), name="height")
        try:
            await self._serve(network, signed, book, circuits)
        finally:
            circuits.end()
            if height_task is not None:
                height_task.cancel()
                await asyncio.gather(height_task, return_exceptions=True)

    async def _follow_height(self, network: Network, signed: SignedManifest) -> None:
        """Look up the run's height every `HEIGHT_SECONDS` and keep it on disk. While no peer trains the run,
        announce the height in a record of this bootstrap, so that newcomers learn of the former progress."""
        process, directory = self.process, network.directory
        height = HighestFinalizedRound(process.config.state / "height.json")
        log_event = process.log.record
        announcer = network.announcer(process, signed)
        while True:
            try:
                records = await look(directory, signed.run_id, len(signed.manifest.stages))
                height.saw(records.values(), directory.now())
                if not height.trained and height.round >= 0:  # A round of -1 means that none is known.
                    claims = Claims(
                        "serving", plain_name(process.config.name), "bootstrap", settled=height.round
                    )
                    record = announcer.record(NO_STAGE, claims)
                    await directory.announce(signed.run_id, NO_STAGE, record, 10.0)
            except WireError as error:
                log_event(log_events.LookUpFailed(what="height", code=error.code, reason=str(error)))
            except UserError as error:  # A full disk: the round is kept in memory until a restart.
                process.notify("height_not_kept", str(error))
            await asyncio.sleep(HEIGHT_SECONDS)

    async def _serve(
        self, network: Network, signed: SignedManifest | None, book: OrderBook | None, circuits: RelayObserver
    ) -> None:
        """Store the run's manifest, order and registry entry regularly, and report the traffic of circuits,
        until cancelled. `book` holds the owner's newest order; it and `signed` are None without a run."""
        process, directory = self.process, network.directory
        stored_at, logged_bytes = float("-inf"), 0
        while True:
            if signed is not None and time.monotonic() >= stored_at + MANIFEST_SECONDS:
                stored_at = time.monotonic()
                with contextlib.suppress(WireError):
                    await directory.put_manifest(signed.run_id, signed.wire(), 10.0)
                if book is not None:
                    await keep(book, directory, process.log.record)  # Order and registry entry.
            process.report.status(StatusLine("bootstrap", swarm_peers=network.dht.known_nodes))
            circuits.look()  # Updates the metrics of the relay.
            relay = network.transport.circuits
            if relay.carried_bytes != logged_bytes:
                logged_bytes = relay.carried_bytes
                traffic = log_events.Circuits(open=relay.circuits, slots=relay.slots, bytes=logged_bytes)
                process.log.record(traffic)
            process.log.flush()
            await asyncio.sleep(LOOK_SECONDS)

    def _notify_how_to_join(self, signed: SignedManifest, address: str) -> None:
        """Print the command with which others join the run through this bootstrap."""
        text = f"run {signed.manifest.name}: others join with: {join_command(signed.run_id, [address])}"
        self.process.notify("run", text)
