"""Find the snapshots to which a run can return: those that peers of each stage offer, and an archive's."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from peers.config.errors import UserError
from peers.network.discovery.record_reader import opened
from peers.network.discovery.visitor_session import RunConnection
from peers.state import checkpoint_file
from peers.state.archive import Archive
from peers.state.archive_restore import signers
from peers.state.archive_store import open_store
from peers.state.snapshot_service import open_root
from peers.telemetry.console import counted
from protocols.errors import WireError
from protocols.messages.table import GetChunk, GetState, Hello, Message, SnapshotOffer
from protocols.signed.envelope import run_bytes
from swarmnet.identifiers import PeerId
from swarmnet.model.state_layout import state_layout
from swarmnet.run.schema import WIRE_VERSION
from swarmnet.snapshots.digest_votes import Root
from swarmnet.snapshots.fetch import choose_root

MAX_ASKED = 8
"""Peers of a stage that are asked, as by an archivist; two thirds of them must name a snapshot."""
DIRECTORY_SECONDS = 15.0
DIAL_SECONDS = 8.0
OFFER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ReturnPoint:
    """A snapshot of one stage to which the run can return."""

    root: Root
    tokens: int | None
    """Tokens in all settled rounds up to it; None if not known."""
    source: str
    """The peers or the archive that have it, in words."""


class _OfferReceiver:
    """Receives the snapshots that peers offer."""

    def __init__(self) -> None:
        self.offers: dict[PeerId, SnapshotOffer] = {}
        self.news = asyncio.Event()

    def received(self, peer: PeerId, _lane: str, message: Message, _body: bytes, _wire_bytes: int) -> None:
        if isinstance(message, SnapshotOffer):
            self.offers[peer] = message
            self.news.set()

    def lost(self, *_: object) -> None:
        """Do nothing: offers are waited for only a short time."""

    refused = lost


async def find_at_peers(connection: RunConnection, stage: int) -> list[ReturnPoint]:
    """Return the snapshots that two thirds of the peers of a stage offer. A chunk of each is requested,
    because peers keep what was requested last."""
    signed, transport = connection.signed, connection.transport
    run, state_bytes = signed.run_id, 4 * state_layout(signed.manifest, stage).size
    found = await connection.directory.look_up(run, stage, DIRECTORY_SECONDS)
    receiver, links = _OfferReceiver(), {}
    transport.listen(receiver)
    for record in sorted(opened(found.values(), run), key=lambda each: -each.sequence)[:MAX_ASKED]:
        with suppress(WireError):
            link = await transport.open(record.peer, "group", DIAL_SECONDS, record.record.addresses)
            link.post(Hello(wire_version=WIRE_VERSION, run_id=run_bytes(run), record=b"", invite=b""))
            link.post(GetState())
            links[record.peer] = link
    with suppress(TimeoutError):
        async with asyncio.timeout(OFFER_SECONDS):
            while receiver.offers.keys() < links.keys():
                receiver.news.clear()
                await receiver.news.wait()
    named: dict[PeerId, list[Root]] = {peer: [] for peer in receiver.offers}
    tokens: dict[Root, int | None] = {}
    for peer, offer in receiver.offers.items():
        for data in offer.roots:
            with suppress(WireError, msgspec.DecodeError, UnicodeDecodeError):
                root, reported = open_root(data, peer, run, stage, state_bytes)
                named[peer].append((root.round, root.digest))
                tokens[root.round, root.digest] = reported
    points = []
    for root_named in sorted(tokens):
        holders = [peer for peer, roots in named.items() if root_named in roots]
        offers = {peer: [root_named] * (peer in holders) for peer in named}
        if root_named[0] < 0 or choose_root(offers) is None:
            continue
        for peer in holders:
            with suppress(WireError):
                links[peer].post(GetChunk(root_named[1], 0))
                await links[peer].drained(0, DIAL_SECONDS)
        points.append(ReturnPoint(root_named, tokens[root_named], counted(len(holders), "peer")))
    for link in links.values():
        link.close()
    return points


def find_in_archive(archive: Archive, stage: int, wanted: int) -> ReturnPoint | None:
    """Return the archive's newest snapshot of a stage up to round `wanted` that a peer has signed; None if
    there is none. Raises UserError for a damaged file."""
    for entry in archive.newest(stage):
        if entry.round > wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / entry.name
            path.write_bytes(archive.checkpoint(entry))
            checkpoint = checkpoint_file.read(path)
        if signers(checkpoint):
            return ReturnPoint((checkpoint.round, checkpoint.digest), checkpoint.tokens, archive.store.url)
    return None


async def find_points(connection: RunConnection, wanted: int, archive: str) -> list[ReturnPoint]:
    """Return for each stage its newest snapshot up to round `wanted`: from its peers, or from the archive at
    a URL ("": none). Raises UserError if a stage has none."""
    store = Archive(open_store(archive)) if archive else None
    if store is not None:
        await asyncio.to_thread(store.open, connection.signed)
    points = []
    for stage in range(len(connection.signed.manifest.stages)):
        at_peers = await find_at_peers(connection, stage)
        fitting = [point for point in at_peers if point.root[0] <= wanted]
        archived = await asyncio.to_thread(find_in_archive, store, stage, wanted) if store else None
        fitting += [archived] if archived is not None else []
        if not fitting:
            offered = ", ".join(str(point.root[0]) for point in at_peers) or "none"
            rounds = ", ".join(str(entry.round) for entry in store.newest(stage)) if store else ""
            in_archive = f"{archive} has {rounds or 'none'}" if store else "no archive was named (--archive)"
            raise UserError(
                f"nothing was ordered: stage {stage} has no snapshot of round {wanted} or before. Its peers "
                f"agree on those of rounds {offered}; {in_archive}"
            )
        points.append(max(fitting, key=lambda point: point.root[0]))
    return points
