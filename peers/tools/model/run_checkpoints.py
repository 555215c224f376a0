"""Fetch the newest signed checkpoint of every stage of a live run, like an archivist."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random

from peers.config.errors import NoAnswer
from peers.network.discovery.bootstrap import PeerCache
from peers.network.discovery.visitor_session import RunConnection, visit_run
from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from peers.stageless.archivist.archivist import Archivist, NotArchived, Policy
from peers.stageless.archivist.archivist_links import ArchivistLinks
from peers.stageless.archivist.serve import NewcomerService
from peers.state.archive import Archive
from peers.state.archive_store import FolderStore
from peers.state.snapshot_service import NoState
from peers.telemetry.event import Event
from peers.telemetry.log_events import Notify
from peers.tools.model.swarm_session import not_let_in
from protocols.errors import WireError
from protocols.signed.identity import Identity

ATTEMPTS = 4
"""Attempts for one stage. Peers sign a snapshot just after making it; an attempt may fall between."""
PAUSE_SECONDS = 5.0
"""Seconds between two attempts: longer than peers take to sign and announce a snapshot on home
connections."""


async def fetch_checkpoints(
    run: str, bootstraps: Sequence[str], cache: PeerCache, notify: Notify, folder: Path, invite: bytes = b""
) -> None:
    """Write one checkpoint of each stage into `folder`, an archive.

    At least one peer of the stage has signed each checkpoint, and two thirds of the queried peers agree on
    it. Raises as `visit_run` does, NoAnswer if no peer of a stage gives its weights, and UserError if the
    folder cannot be written."""
    async with visit_run(run, bootstraps, cache, notify) as found:
        unfit = not_let_in(found.signed, invite, found.transport.peer, found.directory.now())
        if unfit is not None:
            raise NoAnswer(unfit)
        archivist = _archivist(found, folder, invite, notify)
        try:
            await archivist.open()
            for stage in range(len(found.signed.manifest.stages)):
                await _fetch_stage(archivist, stage, notify)
            await archivist.write_facts()
        finally:
            archivist.circle.close()


def _archivist(found: RunConnection, folder: Path, invite: bytes, notify: Notify) -> Archivist:
    """Return an archivist that serves no newcomer, since the directory does not list it."""
    signed, directory = found.signed, found.directory

    def note(_event: Event) -> None:
        """Discard the event: a client keeps no event log."""

    book = OrderBook(signed=signed, kept=None, log_event=note, notify=notify)
    archive = Archive(FolderStore(folder))
    gatekeeper = Gatekeeper(book, invite, directory.now)
    serving = NewcomerService(
        archive=archive,
        signed=signed,
        transport=found.transport,
        admission=gatekeeper,
        record=lambda: b"",
        log_event=note,
    )
    shown = invite if signed.manifest.access == "invite" else b""
    circle = ArchivistLinks(
        book=book,
        transport=found.transport,
        directory=directory,
        invite=shown,
        chance=Random(),
        log_event=note,
        serving=serving,
    )
    archivist = Archivist(
        archive=archive,
        policy=Policy(),
        identity=Identity.generate(),
        book=book,
        circle=circle,
        log_event=note,
        notify=notify,
    )
    circle.listen()
    return archivist


async def _fetch_stage(archivist: Archivist, stage: int, notify: Notify) -> None:
    """Fetch the checkpoint of one stage. Raises NoAnswer after the last attempt, UserError if the folder
    cannot be written."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await archivist.fetch_stage(stage)
            return
        except (NotArchived, WireError, NoState, TimeoutError) as error:
            problem = str(error) or "it took too long"
        finally:
            archivist.circle.part(stage)
        if attempt < ATTEMPTS:
            notify("archive", f"stage {stage}: {problem}; tries again in {PAUSE_SECONDS:g} s")
            await asyncio.sleep(PAUSE_SECONDS)
    stages = len(archivist.manifest.stages)
    raise NoAnswer(
        f"stage {stage} of 0 to {stages - 1} cannot be fetched: {problem}. A model needs every stage, so "
        "nothing was written. Try again when a peer of that stage trains, or read the checkpoints of an "
        "archive: `swarmnet export --hf DIR --from ARCHIVE`"
    )
