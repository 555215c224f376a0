"""The archivist's links: to some peers of every stage, and to newcomers.

The archivist fetches snapshots (settled weights) from the peers of a stage; it takes no part in their rounds.
A statement is a peer's signature of the digest of its settled weights of a round. A newcomer is a peer that
enters a stage without peers, and fetches its weights from the archivist (serve.py). `SnapshotService` fetches
snapshots and serves them, one stage each.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.network.message_router import MessageRouter, handles
from peers.network.orders.order_book import OrderBook
from peers.runtime.lived_clock import Clock
from peers.stageless.archivist.serve import NewcomerService
from peers.state.checkpoint_file import DIGEST_BYTES, STATEMENT_BYTES
from peers.state.snapshot_service import SnapshotService
from peers.telemetry import log_events
from peers.telemetry.reasons import refusal
from protocols.errors import WireError
from protocols.fields import Body, RunSizes
from protocols.messages.table import GetChunk, GetState, Hello, Lane, Message, OrderUpdate, Refuse, Statements
from protocols.messages.terms import Terms
from protocols.ports import Directory, Link, Transport
from protocols.signed.envelope import EnvelopeKind, open_envelope, run_bytes
from protocols.signed.records import SignedRecord, open_record
from swarmnet.identifiers import PeerId
from swarmnet.lineage import era_of
from swarmnet.membership.peer_info import PeerInfo
from swarmnet.run.schema import WIRE_VERSION
from swarmnet.snapshots.digest_votes import ROUNDS_KEPT

MAX_ASKED = 8
"""Peers of a stage that are asked at a time; two thirds of them must agree on a snapshot."""
DIAL_SECONDS = 8.0


class LinkContext:
    """The links to the peers of one stage, for its `SnapshotService`, and the statements of these peers."""

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
        self.router = MessageRouter()
        """Passes on the messages of this stage's peers, and of newcomers to it."""
        self.router.add(self)

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
        self.circle.log_event(log_events.Refused(peer=peer, code=code, reason=reason))

    def roots(self) -> dict[PeerId, frozenset[tuple[int, bytes]]]:
        """Return the (round, digest) pairs that each peer has signed. A signed payload is chain value and
        digest; the chain value is cut off."""
        return {
            peer: frozenset((round, payload[-DIGEST_BYTES:]) for round, (payload, _) in by_round.items())
            for peer, by_round in self.statements.items()
        }

    def signed(self, round: int, payload: bytes) -> dict[PeerId, bytes]:
        """Return the envelopes with this statement about a round, by signer."""
        return {
            peer: by_round[round][1]
            for peer, by_round in self.statements.items()
            if round in by_round and by_round[round][0] == payload
        }

    def told_of(self, peers: set[PeerId]) -> None:
        """Set the current peers of this stage, and forget statements of all others."""
        self.told = peers
        self.statements = {peer: by_round for peer, by_round in self.statements.items() if peer in peers}

    @handles(Statements)
    def receive(self, _peer: PeerId, message: Statements, _body: bytes) -> None:
        """Keep the statements that peers of this stage have signed, about the newest ROUNDS_KEPT rounds of
        each signer. Raises WireError for an invalid statement."""
        for data in message.statements:
            envelope = open_envelope(
                data, self.circle.book.signed.run_id, EnvelopeKind.SETTLED, STATEMENT_BYTES
            )
            _, service = self.circle.states[self.stage]
            is_of_era = era_of(bytes(envelope.payload[:-DIGEST_BYTES])) == service.lineage.era
            if envelope.stage == self.stage and envelope.sender in self.told and is_of_era:
                by_round = self.statements.setdefault(envelope.sender, {})
                by_round[envelope.round] = (bytes(envelope.payload), data)
                if len(by_round) > ROUNDS_KEPT:
                    del by_round[min(by_round)]


@dataclass(eq=False, kw_only=True)
class ArchivistLinks:
    """All links of the archivist. It is the `Receiver` of the transport, which gets every message."""

    book: OrderBook
    transport: Transport
    directory: Directory
    invite: bytes
    chance: Random
    log_event: log_events.LogEvent
    serving: NewcomerService

    def __post_init__(self) -> None:
        self.clock = Clock(
            lambda seconds: self.log_event(log_events.ProcessStalled(seconds=round(seconds, 3)))
        )
        self.states: dict[int, tuple[LinkContext, SnapshotService]] = {}
        """Maps stage to its links and its snapshots."""
        self._links: dict[PeerId, Link] = {}
        self._stages: dict[PeerId, int] = {}
        """Stage of each peer in `_links`."""
        self._dialled_or_served: set[PeerId] = set()
        """Peers that the archivist dialled or responded to."""
        self._router = MessageRouter()
        self._router.add(self)

    def listen(self) -> None:
        longest = max((service.state_bytes for _, service in self.states.values()), default=0)
        sizes = RunSizes(self.book.signed.manifest, state_bytes=longest)
        bodies = MessageRouter(SnapshotService).bodies(sizes)
        self.transport.listen(self, Terms(bodies, lambda peer: peer in self._dialled_or_served))
        self.transport.serve_chunks(self._chunk_of_any_stage)

    def _chunk_of_any_stage(self, digest: bytes, index: int) -> memoryview | None:
        """Return chunk `index` of the snapshot with this digest, and count it as served; None if no stage has
        that snapshot in memory. All stages are searched, because a request does not name one."""
        for stage, (_, service) in self.states.items():
            chunk = service.chunk(digest, index)
            if chunk is not None:
                self.serving.gave(stage, len(chunk))
                return chunk
        return None

    def close(self) -> None:
        """Close the links to peers and newcomers, and drop the snapshots."""
        self.serving.close()
        for _, service in self.states.values():
            service.close()
        for peer in list(self._links):
            self._close_link(peer)
        self.clock.close()

    # -- links ----------------------------------------------------------------------------------------

    async def gather(self, stage: int) -> dict[PeerId, SignedRecord]:
        """Look up the records of a stage, and link to at most `MAX_ASKED` of its peers, chosen at random.
        Returns all records that were found, by peer. Raises WireError if the directory does not answer."""
        run_id = self.book.signed.run_id
        found = await self.directory.look_up(run_id, stage, OPERATION_SECONDS)
        records = {peer: open_record(data, run_id) for peer, data in sorted(found.items())}
        stage_links, _ = self.states[stage]
        stage_links.told_of(set(records))
        not_asked = {self.transport.peer, *self.serving.served()}  # A newcomer has no weights yet.
        chosen = [peer for peer in records if peer not in not_asked]
        self.chance.shuffle(chosen)
        await asyncio.gather(*(self._dial(stage_links, records[peer]) for peer in chosen[:MAX_ASKED]))
        return records

    def part(self, stage: int) -> None:
        """Close the links to a stage's peers. Called when its snapshot has been fetched."""
        for peer in [peer for peer, linked_stage in self._stages.items() if linked_stage == stage]:
            self._close_link(peer)

    async def _dial(self, stage_links: LinkContext, signed: SignedRecord) -> None:
        """Open a link to a peer and send it `Hello`, with an empty record as clients of a run do. A failure
        is logged. Does nothing if the peer is already linked."""
        peer, record = signed.peer, signed.record
        if peer in self._links:
            return
        try:
            link = await self.transport.open(peer, "group", DIAL_SECONDS, record.addresses)
            self._dialled_or_served.add(peer)
            run = run_bytes(self.book.signed.run_id)
            link.post(Hello(wire_version=WIRE_VERSION, run_id=run, record=b"", invite=self.invite))
        except WireError as error:
            self.log_event(log_events.DialFailed(peer=peer, lane="group", code=error.code, reason=str(error)))
            return
        self._links[peer], self._stages[peer] = link, record.stage
        info = PeerInfo(
            record.stage, record.role, tuple(record.addresses), signed.sequence, record=b"", recorded_at=0.0
        )
        info.linked = True
        stage_links.peers[peer] = info

    def post(self, peer: PeerId, message: Message, body: Body = b"") -> bool:
        """Send a message over the peer's link. Returns False if there is no open link or it refuses."""
        link = self._links.get(peer)
        if link is None or link.closed:
            return False
        try:
            link.post(message, body)
        except WireError:
            return False
        return True

    def _close_link(self, peer: PeerId) -> None:
        link = self._remove_link(peer)
        if link is not None:
            link.close()

    def _remove_link(self, peer: PeerId) -> Link | None:
        """Forget a peer's link and stop requests to it. Returns the open link, or None if there was none."""
        link, stage = self._links.pop(peer, None), self._stages.pop(peer, None)
        if stage is not None:
            stage_links, service = self.states[stage]
            stage_links.peers.pop(peer, None)
            service.unlinked(peer)
        return link

    # -- Receiver -------------------------------------------------------------------------------------

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        """Handle a message of any peer. Orders are accepted from all peers, and requests from newcomers.
        Statements, snapshots and refusals are accepted only from peers that the archivist dialled."""
        if lane != "group" and type(message) is Hello:
            return  # The peer only answers this archivist's own `Hello`, over a link of another lane.
        dialled_stage = self._stages.get(peer)
        if not self._router.dispatch(peer, message, body) and dialled_stage is not None:
            stage_links, _ = self.states[dialled_stage]
            stage_links.router.dispatch(peer, message, body)

    @handles(OrderUpdate)
    def _on_order(self, _peer: PeerId, message: OrderUpdate, _body: bytes) -> None:
        self.book.take(message.order)

    @handles(Hello)
    def _on_hello(self, peer: PeerId, hello: Hello, _body: bytes) -> None:
        link = self._remove_link(peer)  # From now on `serving` uses or closes the link.
        if self.serving.greeted(peer, hello, link):
            self._dialled_or_served.add(peer)

    @handles(Refuse)
    def _on_refusal(self, peer: PeerId, refuse: Refuse, _body: bytes) -> None:
        if peer in self._stages:
            self.log_event(log_events.RefusedBy(peer, refusal(refuse.code), refuse.reason[:200]))
            self._close_link(peer)

    @handles(GetState)
    def _on_state_request(self, peer: PeerId, message: GetState, body: bytes) -> None:
        """Answer a newcomer's request if the weights of its stage are in memory. If they are not, they are
        being loaded, and the newcomer repeats its request. Requests of other peers are ignored."""
        stage = self.serving.stage_of(peer)
        if stage is not None and self.serving.on_request(peer, message):
            # The signed statements go first: they prove the snapshot.
            self.serving.post(peer, self.serving.statements(peer))
            self.states[stage][0].router.dispatch(peer, message, body)

    @handles(GetChunk)
    def _on_chunk_request(self, peer: PeerId, message: GetChunk, body: bytes) -> None:
        """Likewise for a chunk."""
        stage = self.serving.stage_of(peer)
        if stage is not None and self.serving.on_request(peer, message):
            self.states[stage][0].router.dispatch(peer, message, body)

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        """Handle the end of a link in either direction. A newcomer is no longer served."""
        self.serving.lost(peer)
        link = self._links.get(peer)
        # If only the peer's link to this archivist has ended, the peer opens one for its next response.
        if link is not None and link.closed:
            self._close_link(peer)

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        self.log_event(log_events.Refused(peer=peer, code=code, reason=reason))
        self._close_link(peer)
