"""Serve newcomers of a stage that has no peers left: give them the archive's newest checkpoint.

The archivist acts like a peer of the stage but reports that it has not begun, so it does not take part in
agreements. A newcomer sends `Hello` with its record. If the run admits it, the archivist answers `Hello`, and
serves it as long as it sends requests. The weights of a stage are in memory only while a newcomer is being
served.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.config.run_file import SignedManifest
from peers.errors import UserError
from peers.network.ports import Admission
from peers.runtime.timer import Timer
from peers.state import checkpoint_file
from peers.state.archive import Archive, ArchivedCheckpoint
from peers.state.archive_store import ArchiveError
from peers.state.snapshot_store import Snapshots, Weights
from peers.state.start_folder import start_state
from peers.telemetry import events as events
from protocols.daemon.temporary import prefix
from protocols.errors import WireError
from protocols.fields import Body
from protocols.messages.table import (
    MAX_STATEMENTS,
    Bye,
    Chunk,
    GetChunk,
    GetState,
    Heartbeat,
    Hello,
    Message,
    Refuse,
    Statements,
)
from protocols.ports import Link, Transport
from protocols.signed.envelope import run_bytes
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import open_record
from swarmnet.identifiers import PeerId
from swarmnet.membership.machine import BEAT_SECONDS
from swarmnet.model.flat_layout import Layout
from swarmnet.rounds.history import START
from swarmnet.run.manifest import WIRE_VERSION

OPEN_SECONDS = 8.0
"""Timeout for opening a link, as for any other (`channels.DIAL_SECONDS`)."""
IDLE_SECONDS = 10.0
"""A newcomer without requests for this many seconds is dropped. A waiting newcomer repeats its request every
few seconds. While it is served, it is not asked for its own weights, which it may have by now."""
MAX_NEWCOMERS = 16
"""Maximum number of newcomers at once. Others start as if there were no archivist, or try again."""


@dataclass(slots=True)
class _Newcomer:
    """A newcomer that is being served."""

    stage: int
    link: Link
    asked_at: float


class NewcomerService:
    """Answers the requests of newcomers."""

    def __init__(
        self,
        archive: Archive,
        signed: SignedManifest,
        transport: Transport,
        admission: Admission,
        record: Callable[[], bytes],
        log_event: events.LogEvent,
        model: Path | None = None,
    ) -> None:
        """Create the service. `record` returns the archivist's own signed record; `model` is the folder of
        the initial model."""
        self.model = model if signed.manifest.init_checkpoint.path else None
        self.archive = archive
        self.signed = signed
        self.transport = transport
        self.admission = admission
        self.record = record
        self.log_event = log_event
        self.snapshots: dict[int, tuple[Snapshots, Layout]] = {}
        """Snapshots and layout by stage."""
        self.served_bytes: Counter[int] = Counter()
        """Bytes of chunks that were handed to connections, by stage."""
        self._statements: dict[int, list[bytes]] = {}
        """Signed statements about the weights in memory, by stage."""
        self._newest: dict[int, int] = {}
        """The archive's newest round when the weights in memory were read. That checkpoint may have been
        damaged."""
        self._newcomers: dict[PeerId, _Newcomer] = {}
        self._greeting: set[PeerId] = set()
        self._loading: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = Timer(self._beat)

    def close(self) -> None:
        self._timer.close()
        for task in self._tasks:
            task.cancel()
        for newcomer in self._newcomers.values():
            newcomer.link.close()
        self._newcomers.clear()

    def stage_of(self, peer: PeerId) -> int | None:
        """Return the stage of a newcomer that is being served, or None if the peer is none."""
        newcomer = self._newcomers.get(peer)
        return newcomer.stage if newcomer is not None else None

    def served(self) -> set[PeerId]:
        """Return the newcomers that are being served or greeted."""
        return {*self._newcomers, *self._greeting}

    # -- Hello -----------------------------------------------------------------------------------------

    def greeted(self, peer: PeerId, hello: Hello, link: Link | None) -> bool:
        """Handle `Hello` of a peer; `link` is an existing link to it. Returns True if it is served. Raises
        WireError for an invalid record."""
        is_served = self._greet_back(peer, hello, link)
        if not is_served and link is not None:
            link.close()
        return is_served

    def _greet_back(self, peer: PeerId, hello: Hello, link: Link | None) -> bool:
        """Start to serve the peer if it is an admitted newcomer. Returns True if it is."""
        if peer in self._greeting or len(self._newcomers) + len(self._greeting) >= MAX_NEWCOMERS:
            return False
        if hello.wire_version != WIRE_VERSION or hello.run_id != run_bytes(self.signed.run_id):
            return False
        refusal = self.admission.refusal(peer, hello.invite)
        if refusal is not None:
            self._spawn(peer, self._send_once(peer, (Refuse(*refusal), *self.admission.evidence())))
            return False
        if not hello.record:
            return False  # A visitor: it wants inference, not weights.
        found = open_record(hello.record, self.signed.run_id)
        if found.peer != peer or found.record.stage not in self.snapshots:
            return False
        self._spawn(peer, self._greet(peer, found.record.stage, found.record.addresses, link))
        return True

    async def _send_once(self, peer: PeerId, messages: tuple[Message, ...]) -> None:
        """Send messages to a peer over a new link and close it."""
        try:
            link = await self.transport.open(peer, "group", OPEN_SECONDS)
            for message in messages:
                link.post(message)
            await link.drained(0, OPEN_SECONDS)
            link.close()
        except WireError as error:
            self.log_event(events.AnswerFailed(peer=peer, code=error.code, reason=str(error)))

    async def _greet(self, peer: PeerId, stage: int, addresses: list[str], link: Link | None) -> None:
        """Send `Hello` to a newcomer, and start to serve it."""
        try:
            if link is None or link.closed:
                link = await self.transport.open(peer, "group", OPEN_SECONDS, addresses)
        except WireError as error:
            self.log_event(events.AnswerFailed(peer=peer, code=error.code, reason=str(error)))
            return
        self._forget(peer)
        self._newcomers[peer] = _Newcomer(stage, link, self._loop.time())
        run = run_bytes(self.signed.run_id)
        self.post(peer, Hello(WIRE_VERSION, run, self.record(), self.admission.invite))
        self._beat()

    def _beat(self) -> None:
        """Send heartbeats once a second, and drop newcomers without recent requests."""
        now = self._loop.time()
        for peer, newcomer in list(self._newcomers.items()):
            if newcomer.link.closed:
                self._forget(peer)
            elif newcomer.asked_at + IDLE_SECONDS <= now:
                self._spawn(None, self._part(newcomer.link))
                self._forget(peer, close=False)
            else:
                self.post(peer, Heartbeat(0, -1, 0.0, NO_STAGE, False, 0, 0.0, 0, True))
        if self._newcomers:
            self._timer.arm(now + BEAT_SECONDS)

    def lost(self, peer: PeerId) -> None:
        """Drop a newcomer whose link has broken."""
        self._forget(peer)

    async def _part(self, link: Link) -> None:
        """Send `Bye`, so that the peer does not take the link for broken, and close it."""
        try:
            link.post(Bye("idle"))
            await link.drained(0, BEAT_SECONDS)
        except WireError as error:
            self.log_event(events.AnswerFailed(peer=link.peer, code=error.code, reason=str(error)))
        link.close()

    def _forget(self, peer: PeerId, close: bool = True) -> None:
        newcomer = self._newcomers.pop(peer, None)
        if newcomer is None:
            return
        if close:
            newcomer.link.close()
        self._free_unused(newcomer.stage)

    def _free_unused(self, stage: int) -> None:
        """Free the weights of a stage when no newcomer of it is served."""
        if stage not in {newcomer.stage for newcomer in self._newcomers.values()}:
            self.snapshots[stage][0].held = ()
            self.snapshots[stage][0].start = None

    # -- responses ------------------------------------------------------------------------------------

    def post(self, peer: PeerId, message: Message, body: Body = b"") -> None:
        """Send to a newcomer while its link is open."""
        newcomer = self._newcomers.get(peer)
        if newcomer is None or newcomer.link.closed:
            return
        try:
            newcomer.link.post(message, body)
        except WireError as error:
            self.log_event(events.AnswerFailed(peer=peer, code=error.code, reason=str(error)))
            return
        if isinstance(message, Chunk):
            self.served_bytes[newcomer.stage] += len(body)

    def on_request(self, peer: PeerId, message: GetState | GetChunk) -> bool:
        """Handle a request of a newcomer. Returns True if it can be answered now. If not, or if the archive
        has newer weights than those in memory, they are loaded, and the newcomer asks again."""
        newcomer = self._newcomers[peer]
        newcomer.asked_at = self._loop.time()
        newest = self.archive.newest(newcomer.stage)
        snapshots, _ = self.snapshots[newcomer.stage]
        if not newest and self.model is not None and snapshots.start is None:
            if newcomer.stage not in self._loading:
                self._loading.add(newcomer.stage)
                self._spawn(None, self._load_start(newcomer.stage, self.model))
            return False
        if not newest or (snapshots.held and self._newest.get(newcomer.stage) == newest[0].round):
            return True
        if newcomer.stage not in self._loading:
            self._loading.add(newcomer.stage)
            self._spawn(None, self._load(newcomer.stage, newest))
        # A newcomer that is fetching older weights gets their remaining chunks, which are not requested
        # again.
        return bool(snapshots.held) and isinstance(message, GetChunk)

    def gave(self, stage: int, size: int) -> None:
        """Count a chunk that was sent on a carrier's connection, which does not name its peer. All newcomers
        of the stage count as active, because each may be fetching."""
        self.served_bytes[stage] += size
        for newcomer in self._newcomers.values():
            if newcomer.stage == stage:
                newcomer.asked_at = self._loop.time()

    def statements(self, peer: PeerId) -> Statements:
        """Return the signed statements about the weights offered to a newcomer."""
        return Statements(self._statements.get(self._newcomers[peer].stage, [])[:MAX_STATEMENTS])

    async def _load(self, stage: int, newest: list[ArchivedCheckpoint]) -> None:
        """Load the newest usable checkpoint of a stage into memory."""
        snapshots, layout = self.snapshots[stage]
        try:
            for entry in newest:
                try:
                    weights, signed = await asyncio.to_thread(self._read, entry, layout)
                except UserError as error:
                    self.log_event(events.ArchiveUnusable(stage=stage, round=entry.round, reason=str(error)))
                    continue
                self._statements[stage] = signed
                await asyncio.to_thread(snapshots.hold, weights)
                return
        finally:
            self._newest[stage] = newest[0].round
            self._loading.discard(stage)
            self._free_unused(stage)  # The newcomer may have gone meanwhile.

    async def _load_start(self, stage: int, model: Path) -> None:
        """Load the initial weights of a stage. They are used as long as nothing later is archived."""
        try:
            units = await asyncio.to_thread(start_state, model, self.signed.manifest, stage)
            await asyncio.to_thread(self.snapshots[stage][0].hold, Weights(units, -1, START, tokens=0))
        except UserError as error:
            self.log_event(events.ArchiveUnusable(stage=stage, round=-1, reason=str(error)))
        finally:
            self._loading.discard(stage)
            self._free_unused(stage)

    def _read(self, entry: ArchivedCheckpoint, layout: Layout) -> tuple[Weights, list[bytes]]:
        """Read and verify an archived checkpoint. Raises ArchiveError or CheckpointError."""
        data = self.archive.checkpoint(entry)
        try:
            with tempfile.TemporaryDirectory(prefix=prefix("archive")) as folder:
                path = Path(folder) / entry.name
                path.write_bytes(data)
                held, units = checkpoint_file.restore_signed(path, self.signed.run_id, entry.stage, layout)
        except OSError as error:
            raise ArchiveError(
                f"{entry.name} cannot be written to a temporary folder: {error}; make room there, or name "
                "another one in TMPDIR"
            ) from None
        return Weights(units, held.round, held.chain, tokens=held.tokens), list(held.signed)

    def _spawn(self, peer: PeerId | None, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if peer is not None:
            self._greeting.add(peer)
            task.add_done_callback(lambda _: self._greeting.discard(peer))
