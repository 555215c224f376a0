"""The archivist role: joins a run, archives it, and serves newcomers of stages without peers.

A newcomer is a peer that enters a stage and needs its weights. A record is a peer's announcement in the
DHT."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from random import Random

from peers.config.errors import UserError
from peers.config.remote_files import retry_until_reached
from peers.data.documents import TextError
from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.network.discovery.bootstrap import find_manifest
from peers.network.discovery.claims import Claims, plain_name
from peers.network.orders.exclusion import first_look, until_excluded
from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from peers.network.orders.republish import keep_forever
from peers.process.role import Network, Process, Role
from peers.runtime.supervision import until_one_ends
from peers.stageless.archivist.archivist import Archivist, Policy
from peers.stageless.archivist.archivist_links import ArchivistLinks
from peers.stageless.archivist.sampler import ArchiveObserver
from peers.stageless.archivist.serve import NewcomerService
from peers.state.archive import Archive
from peers.state.archive_store import StoreUnreachable, open_store
from peers.state.archived_text import ArchivedText
from peers.state.chunks.text_exchange import TextExchange
from peers.state.start_fetch import model_here
from peers.state.start_folder import open_model
from peers.telemetry.console import StatusLine
from protocols.signed.invites import prove_invite
from protocols.signed.peer_record import NO_STAGE

LOOK_SECONDS = 1.0
TEXT_SECONDS = 30.0
"""Interval at which text that is missing, or newly withdrawn, is looked for."""


class ArchivistRole(Role):
    """The role `archivist`."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.archived = False

    async def run(self, network: Network) -> None:
        """Open the archive, join the network, and archive the run until cancelled. Raises UserError if the
        run's owner excludes this peer, now or later."""
        process, config, directory = self.process, self.process.config, network.directory
        assert config.run is not None, "checked by PeerFile"
        notify = partial(process.notify, "archive")
        open_archive_store = partial(asyncio.to_thread, open_store, config.archive)
        store = await retry_until_reached(open_archive_store, StoreUnreachable, notify)
        archive = Archive(store)
        await network.join(process)
        signed = await find_manifest(config.run, directory, config.state / "run.json", process.notify)
        process.known_as(signed.run_id)
        model = await model_here(config.init_checkpoint, signed.manifest, process.notify)
        if model is not None and signed.manifest.init_checkpoint.path:
            await asyncio.to_thread(open_model, model, signed.manifest)
        log_event = process.log.record
        book = OrderBook(
            signed=signed, kept=config.state / "order.bin", log_event=log_event, notify=process.notify
        )
        announcer = network.announcer(process, signed)
        claims = Claims("serving", plain_name(config.name), "archivist")

        def record() -> bytes:
            """Return the signed record. It reports the first stage's newest archived round as progress of the
            run (peers/network/discovery/height.py)."""
            newest = archive.newest(0) if archive.entries else []
            return announcer.record(NO_STAGE, replace(claims, settled=newest[0].round if newest else -1))

        me = process.identity.peer_id
        invite_proof = prove_invite(config.invite_bytes, signed.run_id, me)
        gatekeeper = Gatekeeper(book, invite_proof, directory.now)
        await first_look(book, gatekeeper, directory, me, OPERATION_SECONDS, log_event)
        service = NewcomerService(
            archive=archive,
            signed=signed,
            transport=network.transport,
            admission=gatekeeper,
            record=record,
            log_event=log_event,
            model=model,
        )
        links = ArchivistLinks(
            book=book,
            transport=network.transport,
            directory=directory,
            invite=invite_proof,
            chance=Random(),
            log_event=log_event,
            serving=service,
        )
        archivist = Archivist(
            archive=archive,
            policy=Policy(config.archiving.seconds, config.archiving.newest, config.archiving.every),
            identity=process.identity,
            book=book,
            circle=links,
            log_event=log_event,
            notify=process.notify,
        )
        links.listen()
        try:
            await retry_until_reached(archivist.open, StoreUnreachable, notify)
            process.notify("archive", f"archives the run {signed.manifest.name} in {archive.store.url}")
            await until_one_ends(
                archivist=archivist.run(),
                text=self._keep_text(book, network),
                orders=keep_forever(book, directory, log_event),
                excluded=until_excluded(book, gatekeeper, me),
                announce=announcer.announce_forever(NO_STAGE, record),
                status=self._show(archivist),
            )
        finally:
            links.close()

    async def _keep_text(self, book: OrderBook, network: Network) -> None:
        """Keep the run's text, copy it to the archive and send it to newcomers, without what the owner
        withdraws, until cancelled."""
        config = self.process.config
        is_shared = any(source.is_shared for source in book.signed.manifest.data.sources)
        exchange = TextExchange(
            config=config,
            signed=book.signed,
            transport=network.transport,
            directory=network.directory,
            log_event=self.process.log.record,
            notify=self.process.notify,
        )
        kept_without: frozenset[bytes] | None = None
        while True:
            withdrawn = book.order.documents()
            if is_shared and withdrawn != kept_without:
                try:
                    archived = await asyncio.to_thread(lambda: ArchivedText(open_store(config.archive)))
                    await asyncio.to_thread(archived.withdraw, withdrawn)
                    await exchange.keep(self.process.identity.public_key, withdrawn)
                    await asyncio.to_thread(archived.put, exchange.shelf.paths())
                    kept_without = withdrawn
                except (TextError, UserError, OSError) as error:
                    self.process.notify("text", f"{error}; tries again in {TEXT_SECONDS:g} s")
            await asyncio.sleep(TEXT_SECONDS)

    async def _show(self, archivist: Archivist) -> None:
        """Update the metrics and the status line once a second."""
        observer, archive = ArchiveObserver(archivist, self.process.metrics), archivist.archive
        try:
            while True:
                observer.look()
                self.archived = bool(archive.entries)
                newest = max((entry.round for entry in archive.entries), default=-1)
                self.process.report.status(StatusLine("archiving", round=newest))
                self.process.log.flush()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            observer.look()  # The next session's archivist counts from 0.

    def not_ready(self) -> str | None:
        return None if self.archived else "has archived nothing yet"
