"""The archivist's links: to some peers of every stage, and to newcomers.

From the peers of a stage the archivist fetches snapshots; it takes no part in their rounds. A newcomer is a
peer that enters a stage without peers. It fetches weights from the archivist (serve.py). `LinkContext`
shows a `SnapshotService` the links of one stage as a peer of that stage would. The archivist therefore
fetches snapshots with the same code as a newcomer.
"""

from __future__ import annotations

import asyncio
from random import Random

from peers.archivist.serve import NewcomerService
from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.network.orders.order_book import OrderBook
from peers.runtime.lived_clock import Clock
from peers.state.checkpoint_file import STATEMENT_BYTES
from peers.state.snapshot_service import SnapshotService
from peers.telemetry import events as events
from peers.telemetry.reasons import refusal
from protocols.errors import WireError
from protocols.fields import Body
from protocols.messages.table import (
    STATE_MESSAGES,
    Chunk,
    GetChunk,
    GetState,
    Hello,
    Lane,
    Message,
    OrderUpdate,
    Refuse,
    SnapshotOffer,
    Statements,
)
from protocols.messages.terms import Terms
from protocols.ports import Directory, Link, Transport
from protocols.signed.envelope import EnvelopeKind, open_envelope, run_bytes
from protocols.signed.records import SignedRecord, open_record
from swarmnet.identifiers import PeerId
from swarmnet.membership.machine import PeerInfo
from swarmnet.rounds.history import START
from swarmnet.run.manifest import WIRE_VERSION
from swarmnet.snapshots.digest_votes import ROUNDS_KEPT
from swarmnet.snapshots.fetch import chunk_bytes

MAX_ASKED = 8
"""Peers of a stage that are asked at a time; two thirds of them must agree on a snapshot."""
DIAL_SECONDS = 8.0


class LinkContext:
    """The peers of one stage, as its `SnapshotService` sees them."""

    def __init__(self, circle: ArchivistLinks, stage: int) -> None:
        self.circle = circle
        self.stage = stage
        self.clock = circle.clock
        self.peers: dict[PeerId, PeerInfo] = {}
        """Peers that are linked now."""
        self.statements: dict[PeerId, dict[int, tuple[bytes, bytes]]] = {}
        """Maps signer to round to (chain + digest, envelope)."""
        self.told: set[PeerId] = set()
        """Peers of this stage by the directory. Only their statements count."""

    @property
    def transport(self) -> Transport:
        return self.circle.transport

    def known(self) -> dict[PeerId, PeerInfo]:
        return self.peers

    def answer(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> None:
        """Send a response to a newcomer."""
        self.circle.serving.post(peer, message, body)

    def post(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> bool:
        return self.circle.post(peer, message, body)

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        self.circle.log_event(events.Refused(peer=peer, code=code, reason=reason))

    def roots(self) -> dict[PeerId, frozenset[tuple[int, bytes]]]:
        """Return the (round, digest) pairs that each peer has signed."""
        return {
            peer: frozenset((round, payload[len(START) :]) for round, (payload, _) in held.items())
            for peer, held in self.statements.items()
        }

    def signed(self, round: int, payload: bytes) -> dict[PeerId, bytes]:
        """Return the envelopes with this statement about a round, by signer."""
        return {
            peer: held[round][1]
            for peer, held in self.statements.items()
            if round in held and held[round][0] == payload
        }

    def told_of(self, peers: set[PeerId]) -> None:
        """Set the current peers of this stage, and forget statements of all others."""
        self.told = peers
        self.statements = {peer: held for peer, held in self.statements.items() if peer in peers}

    def receive(self, message: Statements) -> None:
        """Keep the newest statements of each signer. A signer of rounds far ahead displaces only its own.
        Raises WireError for an invalid statement."""
        for data in message.statements:
            envelope = open_envelope(
                data, self.circle.book.signed.run_id, EnvelopeKind.SETTLED, STATEMENT_BYTES
            )
            if envelope.stage == self.stage and envelope.sender in self.told:
                held = self.statements.setdefault(envelope.sender, {})
                held[envelope.round] = (bytes(envelope.payload), data)
                if len(held) > ROUNDS_KEPT:
                    del held[min(held)]


class ArchivistLinks:
    """The `Receiver` of the archivist's transport."""

    def __init__(
        self,
        book: OrderBook,
        transport: Transport,
        directory: Directory,
        invite: bytes,
        chance: Random,
        log_event: events.LogEvent,
        serving: NewcomerService,
    ) -> None:
        self.book = book
        self.serving = serving
        self.transport = transport
        self.directory = directory
        self.invite = invite
        self.chance = chance
        self.log_event = log_event
        self.clock = Clock(lambda seconds: log_event(events.ProcessStalled(seconds=round(seconds, 3))))
        self.states: dict[int, tuple[LinkContext, SnapshotService]] = {}
        self._links: dict[PeerId, Link] = {}
        self._stages: dict[PeerId, int] = {}
        self._met: set[PeerId] = set()
        """Peers that the archivist dialled or responded to."""

    def listen(self) -> None:
        longest = max((chunk_bytes(path.state_bytes) for _, path in self.states.values()), default=0)
        self.transport.listen(self, Terms({Chunk: longest}, lambda peer: peer in self._met))
        self.transport.serve_chunks(self._chunk)

    def _chunk(self, digest: bytes, index: int) -> memoryview | None:
        """Return a chunk of any stage, because all carriers ask over the same kind of connection."""
        for stage, (_, path) in self.states.items():
            chunk = path.chunk(digest, index)
            if chunk is not None:
                self.serving.gave(stage, len(chunk))
                return chunk
        return None

    def close(self) -> None:
        self.serving.close()
        for _, path in self.states.values():
            path.close()
        for peer in list(self._links):
            self._drop(peer)
        self.clock.close()

    # -- links ----------------------------------------------------------------------------------------

    async def gather(self, stage: int) -> dict[PeerId, SignedRecord]:
        """Look up the records of a stage, and link to at most `MAX_ASKED` of its peers, chosen at random.
        Returns all records that were found, by peer. Raises WireError."""
        run_id = self.book.signed.run_id
        found = await self.directory.look_up(run_id, stage, OPERATION_SECONDS)
        records = {peer: open_record(data, run_id) for peer, data in sorted(found.items())}
        stage_links = self.states[stage][0]
        stage_links.told_of(set(records))
        busy = {self.transport.peer, *self.serving.served()}  # A newcomer has nothing to give yet.
        chosen = [peer for peer in records if peer not in busy]
        self.chance.shuffle(chosen)
        await asyncio.gather(*(self._dial(stage_links, records[peer]) for peer in chosen[:MAX_ASKED]))
        return records

    def part(self, stage: int) -> None:
        """Close the links to a stage's peers. Called when its snapshot has been fetched."""
        for peer in [peer for peer, held in self._stages.items() if held == stage]:
            self._drop(peer)

    async def _dial(self, surroundings: LinkContext, signed: SignedRecord) -> None:
        """Link to a peer as a visitor."""
        peer, record = signed.peer, signed.record
        if peer in self._links:
            return
        try:
            link = await self.transport.open(peer, "group", DIAL_SECONDS, record.addresses)
            self._met.add(peer)
            link.post(Hello(WIRE_VERSION, run_bytes(self.book.signed.run_id), b"", self.invite))
        except WireError as error:
            self.log_event(events.DialFailed(peer=peer, lane="group", code=error.code, reason=str(error)))
            return
        self._links[peer], self._stages[peer] = link, record.stage
        known = PeerInfo(record.stage, record.role, tuple(record.addresses), signed.sequence, b"", 0.0)
        known.linked = True
        surroundings.peers[peer] = known

    def post(self, peer: PeerId, message: Message, body: Body = b"") -> bool:
        """Send a message. Returns False without a link, or if it fails."""
        link = self._links.get(peer)
        if link is None or link.closed:
            return False
        try:
            link.post(message, body)
        except WireError:
            return False
        return True

    def _drop(self, peer: PeerId) -> None:
        link = self._release(peer)
        if link is not None:
            link.close()

    def _release(self, peer: PeerId) -> Link | None:
        """Stop requests to a peer, and return its link if there is one."""
        link, stage = self._links.pop(peer, None), self._stages.pop(peer, None)
        if stage is not None:
            surroundings, path = self.states[stage]
            surroundings.peers.pop(peer, None)
            path.unlinked(peer)
        return link

    # -- Receiver -------------------------------------------------------------------------------------

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        """Handle a message; see `Receiver.received`."""
        stage = self._stages.get(peer)
        if isinstance(message, OrderUpdate):
            self.book.take(message.order)
        elif isinstance(message, Hello):
            # Responses to a visitor come on another lane.
            if lane == "group" and self.serving.greeted(peer, message, self._release(peer)):
                self._met.add(peer)
        elif isinstance(message, (GetState, GetChunk)):
            self._handle_request(peer, message)
        elif stage is None:
            return  # The archivist asks nothing of such a peer.
        elif isinstance(message, Statements):
            self.states[stage][0].receive(message)
        elif isinstance(message, STATE_MESSAGES):
            if not isinstance(message, SnapshotOffer) or message.stage == stage:
                self.states[stage][1].message(peer, message, body)
        elif isinstance(message, Refuse):
            self.log_event(
                events.RefusedBy(peer=peer, code=refusal(message.code), reason=message.reason[:200])
            )
            self._drop(peer)

    def _handle_request(self, peer: PeerId, message: GetState | GetChunk) -> None:
        stage = self.serving.stage_of(peer)
        if stage is None or not self.serving.on_request(peer, message):
            return
        if isinstance(message, GetState):
            self.serving.post(peer, self.serving.statements(peer))
        self.states[stage][1].message(peer, message, b"")

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        self.serving.lost(peer)
        link = self._links.get(peer)
        # Their link to us may end: they open another one for the next response.
        if link is not None and link.closed:
            self._drop(peer)

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        self.log_event(events.Refused(peer=peer, code=code, reason=reason))
        self._drop(peer)
