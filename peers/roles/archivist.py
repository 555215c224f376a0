"""The archivist: keeps a run for the day on which all its peers are gone."""

from __future__ import annotations

import asyncio
from random import Random

from peers.archive.archive import Archive
from peers.archive.archivist import Archivist, Policy
from peers.archive.circle import Circle
from peers.archive.store import open_store
from peers.creator.order_book import OrderBook
from peers.creator.upkeep import keep_forever
from peers.joining import find_manifest
from peers.presence import OPERATION_SECONDS
from peers.roles.role import Network, Process, Role
from peers.status import Status
from protocols.errors import WireError
from swarmnet.identifiers import RunId

MANIFEST_SECONDS = 60.0
"""How often it stores the manifest again; it lives 600 s in the directory."""
LOOK_SECONDS = 1.0


class ArchivistRole(Role):
    """Role `archivist`."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.archived = False

    async def run(self, network: Network) -> None:
        """Until it is cancelled."""
        process, config, directory = self.process, self.process.config, network.directory
        assert config.run is not None, "checked by PeerFile"
        archive = Archive(await asyncio.to_thread(open_store, config.archive))
        await network.join(process)
        signed = await find_manifest(config.run, directory, config.state / "run.json", process.say)
        process.known_as(signed.run_id)
        note = process.log.record
        book = OrderBook(signed, config.state / "order.bin", note, process.say)
        circle = Circle(book, network.transport, directory, config.invite_bytes, Random(), note)
        rules = config.archiving
        archivist = Archivist(
            archive, Policy(rules.seconds, rules.newest, rules.every), process.identity, book, circle, note,
            process.say,
        )  # fmt: skip
        circle.listen()
        tasks = []
        try:
            await archivist.open()
            process.say("archive", f"archives the run {signed.manifest.name} in {archive.store.url}")
            tasks = [
                asyncio.create_task(archivist.run(), name="archivist"),
                asyncio.create_task(keep_forever(book, directory, note), name="orders"),
                asyncio.create_task(self._keep_manifest(network, signed.run_id, signed.wire()), name="run"),
                asyncio.create_task(self._show(archive), name="status"),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            circle.close()

    async def _keep_manifest(self, network: Network, run_id: RunId, wire: bytes) -> None:
        while True:
            try:
                await network.directory.put_manifest(run_id, wire, OPERATION_SECONDS)
            except WireError as error:
                self.process.log.record("upkeep_failed", code=error.code, reason=str(error))
            await asyncio.sleep(MANIFEST_SECONDS)

    async def _show(self, archive: Archive) -> None:
        while True:
            self.archived = bool(archive.entries)
            newest = max((entry.round for entry in archive.entries), default=-1)
            self.process.report.status(Status("archiving", round=newest))
            self.process.log.flush()
            await asyncio.sleep(LOOK_SECONDS)

    def not_ready(self) -> str | None:
        return None if self.archived else "has archived nothing yet"
