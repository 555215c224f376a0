"""The peers around this one: found, dialled, greeted, listened to, and noticed when they go.

Finds records in the directory and from neighbours, keeps a link to every peer of the own group and of the
stages next to it, sends beats, and hands everything else to `Listener`. Links are one-way (protocols/
transport.py): this side sends on links it opened, and receives on links that others opened.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from peers.strangers import Strangers
from peers.timer import Timer
from peers.timings import Timings
from protocols.envelope import run_bytes
from protocols.errors import WireError
from protocols.messages import (
    AskManifest,
    Beat,
    Bye,
    Hello,
    Known,
    Lane,
    ManifestIs,
    Message,
    Refuse,
)
from protocols.records import SignedRecord, open_record
from protocols.transport import Body, Link, Transport
from swarmnet.identifiers import PeerId, RunId
from swarmnet.manifest import WIRE_VERSION
from swarmnet.membership import BEAT_SECONDS, Membership
from swarmnet.membership import Known as KnownPeer

DIAL_SECONDS = 8.0
"""p2pd answers within 2 ms when refused, in 5 s when an address is silent (measured)."""
RECORDS_TOLD = 32
MOST_WAITING = 64
"""Long bodies that wait for their lane to open; who asks for more at once asks again."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a beat says of this peer."""

    stage: int
    ready: bool
    slots: int
    service_seconds: float
    round: int


class Listener(Protocol):
    """The peer's roles, as the neighbourhood sees them."""

    def load(self) -> Load: ...

    def linked(self, peer: PeerId, stage: int) -> None:
        """A neighbour can be sent to."""

    def unlinked(self, peer: PeerId, reason: str) -> None:
        """It is lost, silent, or has left."""

    def beat(self, peer: PeerId) -> None:
        """It said how it is: it may have become ready."""

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Anything that is not about the neighbourhood itself."""


@dataclass(slots=True)
class Traffic:
    """Bytes on the wire by message kind, framing included."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Echo:
    """For round-trip times: the newest beat of a neighbour, and when it came."""

    sequence: int = -1
    at: float = 0.0


class Neighbourhood:
    """`Receiver` of the transport."""

    def __init__(
        self,
        transport: Transport,
        run_id: RunId,
        membership: Membership,
        listener: Listener,
        signed_manifest: bytes,
        note: Callable[..., None],
    ) -> None:
        """`note(event, **fields)` writes to the peer's event log."""
        self.transport = transport
        self.run_id = run_id
        self.membership = membership
        self.listener = listener
        self.signed_manifest = signed_manifest
        self.note = note
        self.record = b""
        """The own signed record; empty until the peer knows its stage."""
        self.traffic = Traffic()
        self.timings = Timings()
        self.loop = asyncio.get_running_loop()
        self._links: dict[tuple[PeerId, Lane], Link] = {}
        self._opening: set[tuple[PeerId, Lane]] = set()
        self._waiting: dict[PeerId, list[tuple[Message, Body]]] = {}
        self._greeted: set[PeerId] = set()
        self._echoes: dict[PeerId, _Echo] = {}
        self._beats: dict[int, float] = {}
        self._sequence = 0
        self._strangers = Strangers(transport, self.traffic.sent, note, DIAL_SECONDS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer = Timer(self._beat)
        self._silence = Timer(self._drop_silent)
        self._closed = False

    def start(self) -> None:
        self.transport.listen(self)
        self._timer.arm(self.loop.time())
        self._drop_silent()

    async def close(self, reason: str) -> None:
        """Say Bye and end all links."""
        self._closed = True
        self._timer.close()
        self._silence.close()
        for (peer, lane), link in self._links.items():
            if lane == "group":
                self._post(link, Bye(reason))
                self.note("bye_sent", peer=peer)
        drains = [link.drained(0, 0.5) for link in self._links.values()]
        await asyncio.gather(*drains, return_exceptions=True)  # PeerGone: it left first.
        for link in self._links.values():
            link.close()
        self._links.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- sending --------------------------------------------------------------------------------------

    def post(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> bool:
        """Send if there is a link on that lane; False if not (the caller's deadline will tell it)."""
        link = self._links.get((peer, lane))
        if link is None or link.closed:
            if lane != "bulk" or (peer, "group") not in self._links:
                return False
            waiting = self._waiting.setdefault(peer, [])
            if len(waiting) >= MOST_WAITING:
                return False
            waiting.append((message, body))
            if len(waiting) == 1:
                self._spawn(self._open_bulk(peer))
            return True
        return self._post(link, message, body)

    def _post(self, link: Link, message: Message, body: Body = b"") -> bool:
        try:
            self.traffic.sent[message.kind] += link.post(message, body)
        except WireError as error:
            self.note("post_failed", peer=link.peer, lane=link.lane, code=error.code, reason=str(error))
            return False
        return True

    async def _open_bulk(self, peer: PeerId) -> None:
        """The lane for long bodies is opened when first needed; what was posted meanwhile waits here."""
        opened = await self._open(peer, "bulk")
        for message, body in self._waiting.pop(peer, []):
            if opened:
                self.post(peer, "bulk", message, body)

    # -- links ----------------------------------------------------------------------------------------

    def learn(self, data: bytes) -> PeerId | None:
        """A record from the directory or from a peer; its peer if it is in order. Dials whom it concerns."""
        try:
            signed = open_record(data, self.run_id)
        except WireError as error:
            self.traffic.refused[error.code] += 1
            return None
        self._learn(signed, data)
        return signed.peer

    def _learn(self, signed: SignedRecord, data: bytes) -> None:
        record = signed.record
        self.membership.recorded(
            signed.peer, record.stage, record.role, tuple(record.addresses), signed.sequence, data,
            self.loop.time(),
        )  # fmt: skip
        self._dial_due()

    def _dial_due(self) -> None:
        if self._closed or not self.record:
            return
        for peer in self.membership.to_dial(self.loop.time()):
            self.membership.dialing(peer, True)
            self._spawn(self._dial(peer))

    async def _dial(self, peer: PeerId) -> None:
        try:
            await self._link(peer)
        finally:
            self.membership.dialing(peer, False)

    async def _link(self, peer: PeerId) -> None:
        """Open the lanes that this neighbour is for."""
        known = self.membership.peers[peer]
        lanes: Sequence[Lane] = ("group",) if known.stage == self.membership.stage else ("group", "data")
        for lane in lanes:
            if not await self._open(peer, lane):
                self._unlink(peer, "not reached")
                return
        if peer in self.membership.peers:
            self.membership.linked(peer, self.loop.time())
            self.note("linked", peer=peer, stage=known.stage)
            self.listener.linked(peer, known.stage)
            told = [record for record in self.membership.records(RECORDS_TOLD) if record != known.record]
            self.post(peer, "group", Known(told))
            self._beat_to(peer)

    async def _open(self, peer: PeerId, lane: Lane) -> bool:
        """A link on one lane, greeted. False if the peer was not reached."""
        if self._stands(peer, lane):
            return True
        known: KnownPeer | None = self.membership.peers.get(peer)
        self._opening.add((peer, lane))
        try:
            link = await self.transport.open(peer, lane, DIAL_SECONDS, known.addresses if known else ())
        except WireError as error:
            self.note("dial_failed", peer=peer, lane=lane, reason=str(error))
            return False
        finally:
            self._opening.discard((peer, lane))
        if self._closed or self._stands(peer, lane):
            link.close()
            return not self._closed
        self._links[(peer, lane)] = link
        return self._post(link, Hello(WIRE_VERSION, run_bytes(self.run_id), self.record))

    def _stands(self, peer: PeerId, lane: Lane) -> bool:
        link = self._links.get((peer, lane))
        return link is not None and not link.closed

    def _unlink(self, peer: PeerId, reason: str, left: bool = False) -> None:
        """Forget all links to a peer and tell the roles; it is dialled again unless it has left."""
        for lane in ("group", "data", "bulk"):
            link = self._links.pop((peer, lane), None)
            if link is not None:
                link.close()
        known = self.membership.peers.get(peer)
        was_linked = known is not None and known.linked
        self._echoes.pop(peer, None)
        if left:
            self._greeted.discard(peer)
            self.membership.left(peer)
        else:
            self.membership.unlinked(peer, self.loop.time())
        if was_linked:
            self.note("unlinked", peer=peer, reason=reason)
            self.listener.unlinked(peer, reason)

    # -- Receiver -------------------------------------------------------------------------------------

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        self.traffic.received[message.kind] += wire_bytes
        if self._closed:
            return
        if isinstance(message, Hello):
            self._hello(peer, message)
            return
        if isinstance(message, AskManifest):
            self._spawn(self._strangers.answer(peer, ManifestIs(), self.signed_manifest))
            return
        if peer not in self._greeted:
            self.traffic.refused["malformed"] += 1
            return
        self.membership.heard(peer, self.loop.time())
        match message:
            case Beat():
                self._beaten(peer, message)
            case Known(records):
                for record in records[:RECORDS_TOLD]:
                    self.learn(record)
            case Bye(reason):
                self._unlink(peer, f"left: {reason[:200]}", left=True)
            case Refuse(code, reason):
                self.note("refused_by", peer=peer, code=code, reason=reason[:200])
                self._unlink(peer, f"refused us: {code[:40]}")
            case _:
                self.listener.message(peer, message, body)

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        if self._closed or (peer, lane) in self._opening:
            return
        if lane == "bulk":  # Opened for one snapshot, and again for the next.
            link = self._links.get((peer, lane))
            if link is not None and link.closed:
                del self._links[(peer, lane)]
            return
        self._unlink(peer, reason)

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        self.traffic.refused[code] += 1
        self.note("refused", peer=peer, code=code, reason=reason)

    def _hello(self, peer: PeerId, hello: Hello) -> None:
        code = reason = ""
        if hello.wire_version != WIRE_VERSION:
            code, reason = "wire_version", f"I speak wire version {WIRE_VERSION}, you {hello.wire_version}"
        elif hello.run_id != run_bytes(self.run_id):
            code, reason = "wrong_run", f"this peer trains {self.run_id[:16]}"
        if code:
            self.traffic.refused[code] += 1
            self._spawn(self._strangers.answer(peer, Refuse(code, reason)))
            return
        self._greeted.add(peer)
        if hello.record and self.learn(hello.record) != peer:
            self.traffic.refused["bad_signature"] += 1
            self._greeted.discard(peer)
            return
        known = self.membership.peers.get(peer)
        if known is not None and not known.linked and not known.dialing:
            known.dial_at = 0.0  # It reached us, so it is there: no back-off.
            self._dial_due()

    # -- beats ----------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Once a second: tell the neighbours how we are."""
        now = self.loop.time()
        self._timer.arm(now + BEAT_SECONDS)
        self._sequence += 1
        self._beats = {s: at for s, at in self._beats.items() if s > self._sequence - 32}
        self._beats[self._sequence] = now
        for peer, lane in list(self._links):
            if lane == "group":
                self._beat_to(peer)
        self.membership.forget_old(now)
        self._dial_due()

    def _drop_silent(self) -> None:
        """At the very moment: what a silent peer holds has waited long enough."""
        now = self.loop.time()
        for peer in self.membership.silent(now):
            self._unlink(peer, "silent")
        self._silence.arm(self.membership.next_silence(now))

    def _beat_to(self, peer: PeerId) -> None:
        load = self.listener.load()
        echo = self._echoes.get(peer, _Echo())
        self.post(
            peer,
            "group",
            Beat(
                self._sequence, echo.sequence, self.loop.time() - echo.at if echo.sequence >= 0 else 0.0,
                load.stage, load.ready, load.slots, load.service_seconds, load.round,
            ),
        )  # fmt: skip

    def beat_now(self) -> None:
        """Readiness changed: do not let the neighbours wait for the next beat."""
        for peer, lane in list(self._links):
            if lane == "group":
                self._beat_to(peer)

    def _beaten(self, peer: PeerId, beat: Beat) -> None:
        now = self.loop.time()
        known = self.membership.peers.get(peer)
        if known is not None and known.stage != beat.stage:
            self.refused(peer, "malformed", f"a beat of stage {beat.stage}, its record says {known.stage}")
            return
        self._echoes[peer] = _Echo(beat.sequence, now)
        sent_at = self._beats.get(beat.echo)
        if sent_at is not None:
            self.timings.add("round trip", max(0.0, now - sent_at - beat.echo_delay))
        self.membership.beat(peer, beat.stage, beat.ready, beat.round, beat.service_seconds, now)
        self.listener.beat(peer)

    # -- tasks ----------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            return
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
