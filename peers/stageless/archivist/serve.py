"""Serve newcomers of a stage that has no peers left: give them the archive's newest checkpoint.

The archivist acts like a peer of the stage. It reports that it has not begun to train, and so takes no part
in agreements. A newcomer sends `Hello` with its record. If the run admits it, the archivist answers `Hello`,
and serves it as long as it sends requests. The weights of a stage are in memory only while a newcomer of it
is being served."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.network.ports import Admission
from peers.runtime.timer import Timer
from peers.state import checkpoint_file
from peers.state.archive import Archive, ArchivedCheckpoint
from peers.state.archive_store import ArchiveError
from peers.state.snapshot_store import Snapshots, Weights
from peers.state.start_folder import start_state
from peers.telemetry import log_events
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
from swarmnet.membership.membership import BEAT_SECONDS
from swarmnet.model.flat_layout import Layout
from swarmnet.rounds.history import START
from swarmnet.run.schema import WIRE_VERSION

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
        *,
        archive: Archive,
        signed: SignedManifest,
        transport: Transport,
        admission: Admission,
        record: Callable[[], bytes],
        log_event: log_events.LogEvent,
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
        self._signed_statements: dict[int, list[bytes]] = {}
        """Signed statements about the weights in memory, by stage."""
        self._newest_when_loaded: dict[int, int] = {}
        """The archive's newest round when the weights in memory were read. The checkpoint may be damaged."""
        self._newcomers: dict[PeerId, _Newcomer] = {}
        self._greeting: set[PeerId] = set()
        self._loading: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = Timer(self._beat)

    def close(self) -> None:
        """Cancel all work, and close the links to newcomers."""
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
        """Handle a peer's `Hello`; `link` is an existing link to the peer. Returns True if the peer will be
        served; otherwise `link` is closed. Raises WireError for an invalid record."""
        is_served = self._admit(peer, hello, link)
        if not is_served and link is not None:
            link.close()
        return is_served

    def _admit(self, peer: PeerId, hello: Hello, link: Link | None) -> bool:
        """Start to serve the peer if it is a newcomer that the run admits, and fewer than MAX_NEWCOMERS are
        served. Returns True if so. A peer that the run does not admit gets the refusal and its proof."""
        if peer in self._greeting or len(self._newcomers) + len(self._greeting) >= MAX_NEWCOMERS:
            return False
        if hello.wire_version != WIRE_VERSION or hello.run_id != run_bytes(self.signed.run_id):
            return False
        refusal = self.admission.refusal(peer, hello.invite)
        if refusal is not None:
            code, reason = refusal
            messages = (Refuse(code, reason), *self.admission.evidence())
            self._start_task(peer, self._send_once(peer, messages))
            return False
        if not hello.record:
            return False  # A peer without a record wants inference, not weights.
        signed = open_record(hello.record, self.signed.run_id)
        if signed.peer != peer or signed.record.stage not in self.snapshots:
            return False
        self._start_task(peer, self._start_serving(peer, signed.record.stage, signed.record.addresses, link))
        return True

    async def _send_once(self, peer: PeerId, messages: tuple[Message, ...]) -> None:
        """Send messages to a peer over a new link, and close the link. A failure is logged."""
        try:
            link = await self.transport.open(peer, "group", OPEN_SECONDS)
            for message in messages:
                link.post(message)
            await link.drained(0, OPEN_SECONDS)
            link.close()
        except WireError as error:
            self.log_event(log_events.AnswerFailed(peer=peer, code=error.code, reason=str(error)))

    async def _start_serving(self, peer: PeerId, stage: int, addresses: list[str], link: Link | None) -> None:
        """Send `Hello` to a newcomer, over `link` if that is open, and serve it from now on."""
        try:
            if link is None or link.closed:
                link = await self.transport.open(peer, "group", OPEN_SECONDS, addresses)
        except WireError as error:
            self.log_event(log_events.AnswerFailed(peer=peer, code=error.code, reason=str(error)))
            return
        self._stop_serving(peer)  # Ends an earlier link to this peer, if there is one.
        self._newcomers[peer] = _Newcomer(stage, link, asked_at=self._loop.time())
        run = run_bytes(self.signed.run_id)
        self.post(peer, Hello(WIRE_VERSION, run, self.record(), self.admission.invite))
        self._beat()

    def _beat(self) -> None:
        """Send a heartbeat to every newcomer, drop those without recent requests, and repeat in a second. The
        heartbeat says that this peer is not ready, and wants to keep the link."""
        now = self._loop.time()
        heartbeat = Heartbeat(
            sequence=0,
            echo=-1,
            echo_delay=0.0,
            stage=NO_STAGE,
            ready=False,
            slots=0,
            service_seconds=0.0,
            round=0,
            wanted=True,
        )
        for peer, newcomer in list(self._newcomers.items()):
            if newcomer.link.closed:
                self._stop_serving(peer)
            elif newcomer.asked_at + IDLE_SECONDS <= now:
                self._start_task(None, self._close_politely(newcomer.link))
                self._stop_serving(peer, close=False)
            else:
                self.post(peer, heartbeat)
        if self._newcomers:
            self._timer.arm(now + BEAT_SECONDS)

    def lost(self, peer: PeerId) -> None:
        """Drop a newcomer whose link has broken."""
        self._stop_serving(peer)

    async def _close_politely(self, link: Link) -> None:
        """Send `Bye`, so that the peer does not take the link for broken, and close the link."""
        try:
            link.post(Bye("idle"))
            await link.drained(0, BEAT_SECONDS)
        except WireError as error:
            self.log_event(log_events.AnswerFailed(peer=link.peer, code=error.code, reason=str(error)))
        link.close()

    def _stop_serving(self, peer: PeerId, close: bool = True) -> None:
        """Forget a newcomer, close its link if `close`, and free weights that are not needed."""
        newcomer = self._newcomers.pop(peer, None)
        if newcomer is None:
            return
        if close:
            newcomer.link.close()
        self._free_unused(newcomer.stage)

    def _free_unused(self, stage: int) -> None:
        """Free the weights of a stage when no newcomer of it is served."""
        if stage not in {newcomer.stage for newcomer in self._newcomers.values()}:
            snapshots, _ = self.snapshots[stage]
            snapshots.held = ()
            snapshots.start = None

    # -- responses ------------------------------------------------------------------------------------

    def post(self, peer: PeerId, message: Message, body: Body = b"") -> None:
        """Send a message to a newcomer; without an open link do nothing. Bytes of chunks are counted."""
        newcomer = self._newcomers.get(peer)
        if newcomer is None or newcomer.link.closed:
            return
        try:
            newcomer.link.post(message, body)
        except WireError as error:
            self.log_event(log_events.AnswerFailed(peer=peer, code=error.code, reason=str(error)))
            return
        if isinstance(message, Chunk):
            self.served_bytes[newcomer.stage] += len(body)

    def on_request(self, peer: PeerId, message: GetState | GetChunk) -> bool:
        """Handle a newcomer's request. Returns True if it can be answered now from the weights in memory. If
        these are not the archive's newest, or the initial ones while nothing is archived, they are loaded.
        Until then the newcomer repeats its request."""
        newcomer = self._newcomers[peer]
        newcomer.asked_at = self._loop.time()
        newest = self.archive.newest(newcomer.stage)
        snapshots, _ = self.snapshots[newcomer.stage]
        if not newest and self.model is not None and snapshots.start is None:
            if newcomer.stage not in self._loading:
                self._loading.add(newcomer.stage)
                self._start_task(None, self._load_initial_weights(newcomer.stage, self.model))
            return False
        if not newest:
            return True  # Nothing is archived, and no initial weights are left to load.
        if snapshots.held and self._newest_when_loaded.get(newcomer.stage) == newest[0].round:
            return True  # The newest weights are in memory.
        if newcomer.stage not in self._loading:
            self._loading.add(newcomer.stage)
            self._start_task(None, self._load_checkpoint(newcomer.stage, newest))
        # Older weights are in memory until then: a newcomer that is fetching them gets the other chunks.
        return bool(snapshots.held) and isinstance(message, GetChunk)

    def gave(self, stage: int, size: int) -> None:
        """Count the `size` bytes of a chunk that was sent on a connection for chunks only, which does not
        name the receiver. All newcomers of the stage count as active, because each may be fetching."""
        self.served_bytes[stage] += size
        for newcomer in self._newcomers.values():
            if newcomer.stage == stage:
                newcomer.asked_at = self._loop.time()

    def statements(self, peer: PeerId) -> Statements:
        """Return the signed statements about the weights offered to a newcomer."""
        return Statements(self._signed_statements.get(self._newcomers[peer].stage, [])[:MAX_STATEMENTS])

    async def _load_checkpoint(self, stage: int, newest: list[ArchivedCheckpoint]) -> None:
        """Load the first readable checkpoint of `newest` into memory; unreadable ones are logged."""
        snapshots, layout = self.snapshots[stage]
        try:
            for entry in newest:
                try:
                    weights, signed = await asyncio.to_thread(self._read_checkpoint, entry, layout)
                except UserError as error:
                    self.log_event(
                        log_events.ArchiveUnusable(stage=stage, round=entry.round, reason=str(error))
                    )
                    continue
                self._signed_statements[stage] = signed
                await asyncio.to_thread(snapshots.hold, weights)
                return
        finally:
            self._newest_when_loaded[stage] = newest[0].round  # Even if unreadable: it is not tried again.
            self._loading.discard(stage)
            self._free_unused(stage)  # The newcomer may have gone meanwhile.

    async def _load_initial_weights(self, stage: int, model: Path) -> None:
        """Load a stage's initial weights from the model's folder, while nothing later is archived."""
        try:
            units = await asyncio.to_thread(start_state, model, self.signed.manifest, stage)
            snapshots, _ = self.snapshots[stage]
            weights = Weights(units, settled_round=-1, chain=START, tokens=0)
            await asyncio.to_thread(snapshots.hold, weights)
        except UserError as error:
            self.log_event(log_events.ArchiveUnusable(stage=stage, round=-1, reason=str(error)))
        finally:
            self._loading.discard(stage)
            self._free_unused(stage)

    def _read_checkpoint(self, entry: ArchivedCheckpoint, layout: Layout) -> tuple[Weights, list[bytes]]:
        """Return the weights and signed statements of an archived checkpoint, verified. Raises ArchiveError
        or CheckpointError."""
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

    def _start_task(self, peer: PeerId | None, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task. Until it ends, `peer` counts as being greeted."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if peer is not None:
            self._greeting.add(peer)
            task.add_done_callback(lambda _: self._greeting.discard(peer))
