"""Manage the links to other peers: find, dial and greet them, exchange heartbeats, and detect when they go.

Neighbours are the peers to which this one keeps links: some of its own group and of the adjacent stages. A
link is one-way: the peer that opened it sends, first `Hello`. It has a lane (purpose): `group`, `data` or
`bulk`. The membership is the table of known peers, made from their records (signed announcements). It decides
which are neighbours and which to dial. Messages that are not about links go to `Listener`, this peer's roles.
A visitor is a peer without such links, like an inference client."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from peers.network.channels import DIAL_SECONDS, LinkPool, TrafficCounters
from peers.network.handshakes import Handshakes
from peers.network.heartbeats import Heartbeats
from peers.network.message_router import MessageRouter, handles
from peers.network.one_off_replies import OneOffReplies
from peers.network.ports import Admission, Listener, OpenToAll
from peers.runtime.lived_clock import Clock
from peers.runtime.timer import Timer
from peers.telemetry import log_events
from peers.telemetry.counters import Timings
from peers.telemetry.reasons import refusal
from protocols.errors import BadSignature, NoPlace, WireError
from protocols.fields import Body
from protocols.messages.table import (
    HEADER_LIMIT,
    Bye,
    GetManifest,
    Heartbeat,
    Hello,
    Lane,
    ManifestResponse,
    Message,
    PeerRecords,
    Refuse,
)
from protocols.messages.terms import ANYTHING, Bodies, Terms
from protocols.ports import Transport
from protocols.signed.envelope import run_bytes
from protocols.signed.records import ANNOUNCE_SECONDS, SignedRecord, open_record
from swarmnet.identifiers import PeerId, RunId
from swarmnet.membership.address_ranges import dialable
from swarmnet.membership.membership import FORGOTTEN_AT_ONCE, MANY, SILENT_SECONDS, Membership
from swarmnet.membership.peer_info import PeerInfo as KnownPeer
from swarmnet.run.schema import WIRE_VERSION

RECORDS_TOLD = 32
"""Maximum number of records of other peers that are sent to a new neighbour, and accepted in a message."""
RECORDS_BYTES = HEADER_LIMIT // 2
"""Maximum size in bytes of the records in a message: its header must have room for them, however long."""
CROWDED_SECONDS = 0.5
"""With more than MANY known peers, choosing whom to dial runs at most once in this many seconds."""
INTRODUCED_SECONDS = 2 * ANNOUNCE_SECONDS
"""Seconds for which a peer counts as a newcomer; later the directory has its record."""
GOODBYES = {"moving": "moved", "pausing": "paused"}
"""Maps the reason in a `Bye` to the code of the departure; others have `left`."""


@dataclass(eq=False, kw_only=True)
class PeerLinks:
    """The links of one peer, called its neighbourhood. It is the `Receiver` of the transport. `log_event`
    writes to the peer's event log; `bodies` has the largest accepted bodies. Without `admission`, the run is
    open to all."""

    transport: Transport
    run_id: RunId
    membership: Membership
    listener: Listener
    signed_manifest: bytes
    log_event: log_events.LogEvent
    bodies: InitVar[Bodies] = ANYTHING.bodies
    admission: Admission = field(default_factory=OpenToAll)

    def __post_init__(self, bodies: Bodies) -> None:
        self.record = b""
        """This peer's own signed record; empty until the peer knows its stage."""
        self.traffic = TrafficCounters()
        self.clock = Clock(self._on_stall)
        """Measures silence and timeouts, here and in the peer's other parts. It excludes time while the
        process was stopped."""
        self._link_pool = LinkPool(
            transport=self.transport,
            sent=self.traffic.sent,
            hello=self._make_hello,
            addresses=self._addresses,
            log_event=self.log_event,
        )
        self._handshakes = Handshakes()
        self._terms = Terms(bodies, self._handshakes.greeted.__contains__)
        self.heartbeats = Heartbeats(
            membership=self.membership,
            links=self._link_pool,
            listener=self.listener,
            sent=self._look_after_links,
        )
        self._introduced: dict[PeerId, set[PeerId]] = {}
        """Maps neighbour to the newcomers whose records were sent to it."""
        self._one_off_replies = OneOffReplies(
            transport=self.transport,
            sent=self.traffic.sent,
            log_event=self.log_event,
            deadline_seconds=DIAL_SECONDS,
        )
        self._silence = Timer(self._drop_silent, self.clock)
        self._dials = Timer(self._dial_due)
        self._dialled_at = float("-inf")
        self._router = MessageRouter()
        self._router.add(self)

    def start(self) -> None:
        self.transport.listen(self, self._terms)
        self.heartbeats.start()
        self._drop_silent()

    async def close(self, reason: str) -> None:
        """Send the newest record and `Bye` with `reason`, end all links and stop all tasks. An empty `reason`
        sends neither. Peers that find the record in the directory later then know it already."""
        self.heartbeats.close()
        self._silence.close()
        self._dials.close()
        self.clock.close()
        own_record = [PeerRecords([self.record])] if self.record else []
        await self._link_pool.close([*own_record, Bye(reason)] if reason else [])

    def _on_stall(self, seconds: float) -> None:
        self.log_event(log_events.ProcessStalled(seconds=round(seconds, 3)))
        self.listener.on_stall(seconds)

    @property
    def greeted(self) -> Collection[PeerId]:
        """The peers whose messages are accepted."""
        return self._handshakes.greeted.keys()

    @property
    def timings(self) -> Timings:
        """The measured round trips."""
        return self.heartbeats.timings

    # -- sending --------------------------------------------------------------------------------------

    def post(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> bool:
        """Send a message to a linked peer, as `LinkPool.post`. Returns False if it cannot be sent."""
        return self._link_pool.post(peer, lane, message, body)

    def answer(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> None:
        """Send a response to a neighbour, or to a visitor over a link that is opened back."""
        if self.is_visitor(peer):
            self.listener.answer_visitor(peer, message, body)
        else:
            self.post(peer, lane, message, body)

    def is_visitor(self, peer: PeerId) -> bool:
        """Return True if no link to the peer is kept here: it is unknown or has no stage (an archivist)."""
        known = self.membership.peers.get(peer)
        return known is None or (known.stage < 0 and not known.linked)

    def known(self) -> Mapping[PeerId, KnownPeer]:
        return self.membership.peers

    def linked(self, stage: int) -> list[PeerId]:
        """Return the peers of a stage that have links."""
        return [peer for peer, known in self.known().items() if known.stage == stage and known.linked]

    def queued_bytes(self, peer: PeerId, lane: Lane) -> int:
        return self._link_pool.queued_bytes(peer, lane)

    # -- links ----------------------------------------------------------------------------------------

    def learn(self, data: bytes, sender: PeerId | None = None) -> PeerId | None:
        """Verify a record, add its peer to the membership, and dial the peers that are due. `sender` is the
        peer that sent it; None: it is from the directory. Returns the record's peer, or None if the record is
        invalid. Raises WireError instead if a peer sent it, because that peer should have checked it."""
        peer = self._verify_and_add(data, sender)
        self._dial_due()
        return peer

    def learn_all(self, records: Iterable[bytes], sender: PeerId) -> None:
        """Learn several records that a peer sent, and then dial the peers that are due. The first invalid
        record raises WireError."""
        try:
            for data in records:
                self._verify_and_add(data, sender)
        finally:
            self._dial_due()  # Once: in a large group, choosing whom to dial takes long.

    def learn_found(self, records: Mapping[PeerId, bytes]) -> None:
        """Learn records of the directory, and then dial the peers that are due. Invalid records are skipped.
        Known ones are not verified again. If the membership is full, only some of those of unknown peers are
        learned, chosen at random: an attacker can store any number."""
        known = self.membership.peers
        news = [peer for peer, data in records.items() if peer not in known or known[peer].record != data]
        if self.membership.is_full:
            strangers = [peer for peer in news if peer not in known]
            chosen = self.membership.chance.sample(strangers, min(len(strangers), FORGOTTEN_AT_ONCE))
            news = [peer for peer in news if peer in known] + chosen
        for peer in news:
            self._verify_and_add(records[peer], None)
        self.membership.met(self.listener.met())
        self._dial_due()

    def _verify_and_add(self, data: bytes, sender: PeerId | None) -> PeerId | None:
        """Verify a record, and add its peer to the membership unless it is excluded. A record of this peer's
        own key goes to the listener instead. Returns the peer; None or WireError as in `learn`."""
        try:
            signed = open_record(data, self.run_id)
        except WireError as error:
            if sender is not None:
                raise
            self.traffic.refused[error.code] += 1  # From the directory, where anyone can store.
            return None
        if signed.peer == self.membership.me:
            self.listener.own_record(signed)
        elif not self.admission.shuns(signed.peer):
            self._add_record(signed, data, sender)
        return signed.peer

    def _add_record(self, signed: SignedRecord, data: bytes, sender: PeerId | None) -> None:
        """Add a verified record to the membership. Peers without an invite are refused if the run requires
        one. If the record moves a linked peer to another stage, its links are ended, to be opened again."""
        record, before = signed.record, self.membership.peers.get(signed.peer)
        old_stage = before.stage if before is not None else record.stage
        needs_invite = self.admission.by_invite and record.stage >= 0
        invited = needs_invite and self.admission.invited(signed.peer, record.invite)
        if needs_invite and not invited:
            self.traffic.refused["not_invited"] += 1
            return
        if needs_invite and before is not None and before.invited and not record.invite:
            data = before.record  # Other peers need the earlier record, which contains the invite.
        addresses = dialable(record.addresses, self.transport.addresses)
        old_start = before.started if before is not None else record.started
        is_news = self.membership.recorded(
            signed.peer,
            record.stage,
            record.role,
            addresses,
            signed.sequence,
            data,
            self.clock.time(),
            sender,
            invited,
            record.up_bytes_per_second,
            record.uploads_seen,
        )
        if is_news:
            known = self.membership.peers[signed.peer]
            known.started, known.name = record.started, record.name
            if record.started != old_start:
                # Maybe two processes use one key: the linked one must see the record of the other.
                self.post(signed.peer, "group", PeerRecords([data]))
        # `recorded` has updated `before` in place: if its stage is another now, it needs other links.
        if before is not None and before.linked and before.stage != old_stage:
            self._unlink(signed.peer, "moved", f"it is in stage {before.stage} now")

    def introduce(self, contributors: Iterable[PeerId], peers: Iterable[PeerId]) -> None:
        """Send these peers the records of `contributors`, once each, because they ignore contributions of
        unknown peers. Contributors that this peer met over `INTRODUCED_SECONDS` ago are left out: their
        records are in the directory. Peers that sent such a record here (`tellers`) do not get it."""
        met_since = self.clock.time() - INTRODUCED_SECONDS
        known = self.membership.peers
        recent = [one for one in contributors if one in known and known[one].stage >= 0]
        recent = [one for one in recent if known[one].met_at >= met_since]
        for peer in peers if recent else ():
            introduced = self._introduced.setdefault(peer, set())
            news = [one for one in recent if one not in introduced and peer not in (one, *known[one].tellers)]
            introduced.update(news)
            self._send_records(peer, [known[one].record for one in news])

    def _send_records(self, peer: PeerId, records: Iterable[bytes]) -> None:
        """Send a neighbour records of other peers, in as many messages as they need."""
        parts: list[list[bytes]] = [[]]
        for record in records:
            if len(parts[-1]) == RECORDS_TOLD or sum(map(len, parts[-1])) + len(record) > RECORDS_BYTES:
                parts.append([])
            parts[-1].append(record)
        for part in parts:
            if part:
                self.post(peer, "group", PeerRecords(part))

    def _dial_due(self) -> None:
        """Dial the peers that the membership chooses now. With more than `MANY` known peers, do so at most
        once in `CROWDED_SECONDS`. Without an own record, nothing is dialled."""
        if self._link_pool.closed or not self.record:
            return
        now = asyncio.get_running_loop().time()
        if len(self.membership.peers) > MANY and now < self._dialled_at + CROWDED_SECONDS:
            self._dials.arm(self._dialled_at + CROWDED_SECONDS)
            return
        self._dialled_at = now
        for peer in self.membership.begin_dials(self.clock.time()):
            self._link_pool.spawn(self._dial(peer))

    async def _dial(self, peer: PeerId) -> None:
        try:
            await self._link(peer)
        finally:
            self.membership.dialing(peer, False)

    async def reach(self, data: bytes) -> None:
        """Link to a peer that is not a neighbour (an archivist), by its record `data`. Does nothing if the
        record is invalid or the peer is already linked or being dialled."""
        peer = self.learn(data)
        known = self.membership.peers.get(peer) if peer is not None else None
        if peer is not None and known is not None and not (known.linked or known.dialing):
            self.membership.dialing(peer, True)
            await self._dial(peer)

    async def _link(self, peer: PeerId) -> None:
        """Open the links that this peer's stage needs, and report it to the listener as linked. Its `Hello`
        may report another stage than the directory did; then the links of that stage are opened too."""
        linked_stage = None
        known = self.membership.peers.get(peer)
        # `known` is None if the peer sent `Bye` meanwhile.
        while known is not None and known.stage != linked_stage:
            linked_stage = known.stage
            failure = await self._open_lanes(peer, linked_stage)
            if self.membership.refuses(peer, self.clock.time()):  # It forged something meanwhile.
                failure = BadSignature.code
            if failure:
                self._unlink(peer, failure)
                return
            known = self.membership.peers.get(peer)
        if known is not None:
            self.membership.linked(peer, self.clock.time())
            self.log_event(log_events.Linked(peer=peer, stage=known.stage))
            self.listener.linked(peer, known.stage)
            self.listener.counted(self.membership.group_size())
            records = [record for record in self.membership.records(RECORDS_TOLD) if record != known.record]
            self._send_records(peer, records)
            self.heartbeats.send(peer)

    async def _open_lanes(self, peer: PeerId, stage: int) -> str:
        """Open the lanes to a peer of that stage and wait for its first message. Returns an empty string, or
        the code of the failure. During the wait, the other peer may close its links, which ends this peer's
        as well. Lanes that are closed by then are opened a second time."""
        if peer not in self.greeted:  # Its `Hello` will show that it is alive and in this run.
            self._handshakes.setdefault(peer, asyncio.Event())
        is_adjacent_stage = stage >= 0 and stage != self.membership.stage
        lanes: Sequence[Lane] = ("group", "data") if is_adjacent_stage else ("group",)
        for attempt in (1, 2):
            for lane in lanes:
                if not await self._link_pool.open(peer, lane):
                    return "not_reached"
            if attempt == 1 and not await self._handshakes.speaks(peer, SILENT_SECONDS):
                return "still_silent"
        return ""

    def _make_hello(self) -> Hello:
        return Hello(WIRE_VERSION, run_bytes(self.run_id), self.record, self.admission.invite)

    def _addresses(self, peer: PeerId) -> Sequence[str]:
        known = self.membership.peers.get(peer)
        return known.addresses if known is not None else ()

    def _unlink(self, peer: PeerId, code: str, reason: str = "", left: bool = False) -> None:
        """Drop all links to a peer and notify the listener of the reason. With `left`, the peer is forgotten
        and not dialled again. Else a link that no side needs counts as released, unless the peer moved."""
        self._link_pool.drop(peer)
        self._introduced.pop(peer, None)
        known = self.membership.peers.get(peer)
        was_linked = known is not None and known.linked
        released = not left and code != "moved" and was_linked and not self.membership.needs(peer)
        self.heartbeats.echoes.forget(peer)
        if left:
            self._handshakes.pop(peer, None)
            self._handshakes.greeted.pop(peer, None)
            self.membership.left(peer)
        elif released:
            self.membership.released(peer)
        else:
            self.membership.unlinked(peer, self.clock.time())
        if was_linked:
            self.traffic.departures[code] += 1
            self.log_event(
                log_events.Unlinked(peer=peer, code=code, reason=reason or code, released=released)
            )
            self.listener.unlinked(peer, reason or code, released)
            self.listener.counted(self.membership.group_size())

    def part_from(self, peer: PeerId, code: str, reason: str) -> None:
        """End the links to a peer that is no longer accepted, and send it code and reason. Unless the owner
        has banned the peer, it is accepted again when it announces a newer record."""
        self._handshakes.greeted.pop(peer, None)
        if peer in self.membership.peers:
            self._unlink(peer, code, reason, left=True)
            self._send_refusal(peer, code, reason)

    def _send_refusal(self, peer: PeerId, code: str, reason: str) -> None:
        """Record that a peer is refused. Send it the reason, and the owner's order if that excludes it."""
        self._record_refusal(peer, code, reason)
        evidence = self.admission.evidence() if code in ("banned", "not_invited") else []
        for message in (Refuse(code, reason), *evidence):
            self._link_pool.spawn(self._one_off_replies.answer(peer, message))

    # -- Receiver -------------------------------------------------------------------------------------

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        """Handle a message of `wire_bytes`. Before its `Hello`, a peer may only request the manifest or send
        an order of the run's owner. Messages that are not about links go to the listener. Raises NoPlace,
        which ends the link, if the peer gets no link in return: it then turns to others."""
        self.traffic.received[message.kind] += wire_bytes
        if self._link_pool.closed:
            return
        is_greeted = peer in self.greeted
        if not is_greeted and not message.before_hello:
            self.traffic.refused["malformed"] += 1
            return
        if is_greeted:
            self._mark_alive(peer)
        if not self._router.dispatch(peer, message, body):
            self.listener.message(peer, message, body)
        if peer in self.greeted and self.membership.finds_no_place(peer):
            raise NoPlace("others have all places")

    @handles(GetManifest)
    def _send_manifest(self, peer: PeerId, _message: GetManifest, _body: bytes) -> None:
        self._link_pool.spawn(self._one_off_replies.answer(peer, ManifestResponse(), self.signed_manifest))

    @handles(PeerRecords)
    def _learn_records(self, peer: PeerId, message: PeerRecords, _body: bytes) -> None:
        self.learn_all(message.records[:RECORDS_TOLD], peer)

    @handles(Bye)
    def _on_bye(self, peer: PeerId, bye: Bye, _body: bytes) -> None:
        code = GOODBYES.get(bye.reason, "left")
        self._unlink(peer, code, f"left: {bye.reason[:200]}", left=True)

    @handles(Refuse)
    def _on_refusal(self, peer: PeerId, refuse: Refuse, _body: bytes) -> None:
        self.log_event(log_events.RefusedBy(peer, refusal(refuse.code), refuse.reason[:200]))
        self._unlink(peer, "refused_us", f"refused us: {refuse.code[:40]}")

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        if not self._link_pool.closed and self._link_pool.ended(peer, lane):
            self._unlink(peer, "connection_lost", reason)

    def _mark_alive(self, peer: PeerId) -> None:
        self.membership.on_heartbeat(peer, self.clock.time())
        self._handshakes.message_arrived(peer)

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        """Record that something was refused. If a peer sent something forged, end its links, and accept no
        messages and links of it for a while."""
        if code == NoPlace.code:  # As often as strangers like: counted, not written down.
            self.traffic.refused[code] += 1
            return
        self._record_refusal(peer, code, reason)
        if code == BadSignature.code and not self._link_pool.closed:
            self._handshakes.greeted.pop(peer, None)
            self._unlink(peer, code, reason)
            self.membership.forged(peer, self.clock.time())

    def _record_refusal(self, peer: PeerId, code: str, reason: str) -> None:
        self.traffic.refused[code] += 1
        self.log_event(log_events.Refused(peer=peer, code=code, reason=reason))

    @handles(Hello)
    def _handle_hello(self, peer: PeerId, hello: Hello, _body: bytes) -> None:
        """Handle `Hello`: refuse the peer, or accept its messages, learn its record and dial it. Raises
        BadSignature if the record is another peer's."""
        code = reason = ""
        if hello.wire_version != WIRE_VERSION:
            code, reason = "wire_version", f"I speak wire version {WIRE_VERSION}, you {hello.wire_version}"
        elif hello.run_id != run_bytes(self.run_id):
            code, reason = "wrong_run", f"this peer trains {self.run_id[:16]}"
        elif self.membership.refuses(peer, self.clock.time()):
            code, reason = BadSignature.code, "you sent something forged a short time ago"
        else:
            code, reason = self.admission.refusal(peer, hello.invite) or ("", "")
        if code:
            self._send_refusal(peer, code, reason)
            return
        if hello.record and open_record(hello.record, self.run_id).peer != peer:
            raise BadSignature("the record in its greeting is not its own")
        self._handshakes.greet(peer, self.membership.peers)
        self._mark_alive(peer)
        if hello.record:
            self.learn(hello.record, peer)
        known = self.membership.peers.get(peer)
        if known is None:
            return
        self.membership.keeps_us(peer, True)  # The peer wants the link that it has opened.
        if not known.linked and not known.dialing:
            known.dial_at = 0.0  # The peer reached this one, so it is alive: dial at once.
            self._dial_due()

    # -- heartbeats -----------------------------------------------------------------------------------

    def _look_after_links(self) -> None:
        """Forget old peers, end links that no side needs, and dial those that are due, once a second."""
        self.membership.forget_old(self.clock.time())
        self._handshakes.keep(self.membership.peers)
        for peer in self.membership.surplus(self.clock.time()):
            self._unlink(peer, "released")
        self.listener.counted(self.membership.group_size())
        self.membership.met(self.listener.met())
        self._dial_due()

    def _drop_silent(self) -> None:
        """Drop peers that sent nothing for too long, and set the timer to the time when the next peer would
        be dropped. It is the exact time, because microbatches wait at a silent peer."""
        now = self.clock.time()
        for peer in self.membership.silent(now):
            self._handshakes[peer] = asyncio.Event()  # Only a message from now on counts.
            self._unlink(peer, "silent")
        self._silence.arm(self.membership.next_silence(now))

    @property
    def next_beat(self) -> int:
        """Sequence of the next heartbeat."""
        return self.heartbeats.next

    def beat_now(self) -> None:
        """Send heartbeats at once, because this peer's readiness changed."""
        self.heartbeats.send_all()

    @handles(Heartbeat)
    def _handle_heartbeat(self, peer: PeerId, beat: Heartbeat, _body: bytes) -> None:
        """Handle a heartbeat: measure the round trip, and pass on the peer's load. A heartbeat is refused if
        it names another stage than the peer's record; a linked peer is then linked anew."""
        known = self.membership.peers.get(peer)
        if known is not None and known.stage != beat.stage:
            self.refused(peer, "malformed", f"a beat of stage {beat.stage}, its record says {known.stage}")
            if known.linked:  # The peer moved while the link was opened: link again.
                self._unlink(peer, "moved", f"its record says stage {known.stage}, its beat {beat.stage}")
            return
        self.heartbeats.received(peer, beat, self.clock.time())
