"""The `Transport` on p2pd (the libp2p daemon): long-lived raw libp2p streams as one-way links.

A link carries one lane (a class of messages) to one peer. Its opener writes and keeps one read pending, so
that it notices at once when the other side is gone. The other side reads. A new stream starts with a window
of 256 KiB, which doubles once per round trip. Links are therefore kept open (4 MB at 100 ms: 108 ms on a warm
stream, 629 ms on a new one). A slow link has subflows: more streams over the separate connections of
carriers, which are extra p2pd processes. A stranger is a peer that has not sent its first message, `Hello`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from protocols.daemon.hivemind_imports import StreamInfo
from protocols.daemon.multiaddr import is_circuit, through_relay
from protocols.daemon.names import resolve_dialable
from protocols.daemon.p2pd import DAEMON_ERRORS, LOOPBACK, Daemon, DaemonOptions
from protocols.errors import Backlog, PeerGone, WireError
from protocols.framing.intake import Intake
from protocols.framing.send_queue import BACKLOG_BYTES, BoundedLink, LocalLink, ReceiverSlot
from protocols.framing.upload_turns import Upload
from protocols.messages.table import Lane
from protocols.messages.terms import ANYTHING, Terms
from protocols.p2pd.carriers import INTRODUCTION_BYTES, carried_peer
from protocols.p2pd.chunk_streams import CHUNKS_PROTOCOL, ChunkCarriers, ChunkService
from protocols.p2pd.connect import Dialling
from protocols.p2pd.multipath_dialer import SUBFLOW_PROTOCOL, SubflowDialer
from protocols.p2pd.multipath_link import ACKNOWLEDGED, P2pdLink
from protocols.p2pd.reading import FIRST_MESSAGE_SECONDS, StreamReader
from protocols.p2pd.speed_test import SpeedService
from protocols.ports import Arrived, FindChunk, FindText, Progressed, Receiver
from protocols.reachability.dial_back_service import DialBackService
from protocols.reachability.relay_client import Relays
from protocols.reachability.relay_service import RelayService
from protocols.signed.identity import Identity, load
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import public_ranges
from swarmnet.run.schema import WIRE_VERSION

STREAMS_PER_PEER = 32
MAX_SUBFLOWS = 8
"""Maximum subflows of one peer; honest peers open two (multipath_dialer.py)."""
STREAMS = 512
"""Maximum accepted streams. Without it, an attacker took all descriptors in 1.9 s (measured)."""
STREAMS_PER_STRANGER = 8
"""Maximum streams of a peer that has not sent `Hello`: one per lane, and as many that are being reopened."""
STREAMS_OF_STRANGERS = 256
"""Maximum streams of all such peers; the remaining streams are for peers that have sent `Hello`."""
LANES: tuple[Lane, ...] = get_args(Lane)
Handler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def protocol_name(lane: Lane) -> str:
    """Return the libp2p protocol id of a lane."""
    return f"/swarmnet/{WIRE_VERSION}/{lane}"


@dataclass(slots=True)
class _Subflows:
    """The streams that a peer has opened to this one on a lane with acknowledgements."""

    links: int = 0
    """Number of the peer's own streams."""
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    """Streams that its carriers opened in addition."""


class P2pdTransport:
    """The `Transport` over p2pd. Create it with `start`."""

    def __init__(self, daemon: Daemon, identity: Identity, backlog_bytes: int) -> None:
        self.daemon = daemon
        self.chunks = ChunkService()
        """Serves chunks of snapshots to the carriers of other peers."""
        self.relays = Relays(daemon)
        """Slots at relays, for peers that cannot dial this one."""
        self.circuits = RelayService(daemon)
        """Relays circuits for other peers, if the options allow it."""
        self._dialling = Dialling(daemon)
        self._subflow_dialer = SubflowDialer(identity)
        self.upload: Upload | None = None
        """Upload limit shared by all links; None if there is no limit. Set it before the first link opens."""
        self.speed = SpeedService()
        self.checks = (DialBackService(peer=daemon.peer), self.speed)
        """Services that answer `swarmnet doctor` of other peers."""
        self._backlog_bytes = backlog_bytes
        self._intake = Intake()
        self._receiver_slot = ReceiverSlot()
        """The receiver of links that are accepted from now on."""
        self._links: set[P2pdLink] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._accepted: dict[asyncio.Task[Any], tuple[PeerId, ReceiverSlot, asyncio.StreamWriter]] = {}
        self._per_peer: Counter[PeerId] = Counter()
        self._origin_addresses: dict[PeerId, str] = {}
        """The multiaddr from which each peer's newest accepted link comes."""
        self._subflows: dict[PeerId, _Subflows] = {}
        """Subflows of the peers that have a link to us on the data lane."""
        self._closed = False
        self._supervisor = asyncio.create_task(self._supervise(), name="links supervisor")

    @classmethod
    async def start(
        cls, identity_path: Path, options: DaemonOptions, *, backlog_bytes: int = BACKLOG_BYTES
    ) -> P2pdTransport:
        """Start p2pd with the identity in the file, and register the handlers of incoming streams. Raises
        CannotStart (p2pd does not start), IdentityError (the file is unusable) or TimeoutError."""
        identity = load(identity_path)
        transport = cls(await Daemon.start(identity_path, options), identity, backlog_bytes)
        handlers: dict[str, Handler] = {
            protocol_name(lane): partial(transport._accept, lane) for lane in LANES
        }
        handlers |= {CHUNKS_PROTOCOL: transport.chunks.accept, SUBFLOW_PROTOCOL: transport._accept_subflow}
        try:
            for protocol, handler in handlers.items():
                async with asyncio.timeout(options.start_seconds):
                    await transport.daemon.p2p.add_binary_stream_handler(protocol, handler)
            async with asyncio.timeout(options.start_seconds):
                for service in transport.checks:
                    await service.serve(transport.daemon.p2p)
                if options.carries:
                    await transport.circuits.serve(transport.daemon.p2p)
        except BaseException:
            await transport.close()
            raise
        return transport

    @property
    def peer(self) -> PeerId:
        return self.daemon.peer

    @property
    def addresses(self) -> Sequence[str]:
        return (*self.daemon.addresses, *self.relays.addresses)

    @property
    def subflows(self) -> Mapping[str, int]:
        """Return how many extra connections for slow links are `open`, were `opened` or `failed`, and how
        many messages were `repeated` because one broke."""
        open_ = sum(len(link.carriers) for link in self._links)
        counted = self._subflow_dialer.counted
        repeated = counted["repeated"] + sum(link.repeated for link in self._links)
        return {"open": open_, "opened": counted["opened"], "failed": counted["failed"], "repeated": repeated}

    def listen(self, receiver: Receiver, terms: Terms = ANYTHING) -> None:
        """Deliver messages to `receiver` from now on, within `terms`. The previous one gets no more calls."""
        self._receiver_slot.close()
        self._receiver_slot = ReceiverSlot(receiver, terms)

    def limit_upload(self, upload: Upload) -> None:
        """Make all links, and everything that this peer serves to others, share one upload limit."""
        self.upload = upload
        self.chunks.upload = upload
        self.circuits.upload = upload
        self.speed.upload = upload

    def seen_range(self, peer: PeerId) -> str:
        host_address, _, _ = self._origin_addresses.get(peer, "").partition("/p2p/")
        return next(iter(public_ranges((host_address,))), "")

    def on_address_change(self, told: Callable[[], None]) -> None:
        self.relays.moved = told

    def serve_chunks(self, find: FindChunk) -> None:
        self.chunks.close()
        self.chunks.find = find

    def serve_text(self, find: FindText) -> None:
        self.chunks.find_text = find

    async def carriers(self, count: int, arrived: Arrived, progressed: Progressed) -> ChunkCarriers | None:
        """Start carriers to fetch chunks: `arrived` gets each, `progressed` each part. Raises CannotStart."""
        options = replace(LOOPBACK, relay=True)
        return await ChunkCarriers.start(count, options, arrived, progressed, resolve=self._resolve)

    async def ended(self) -> str:
        """Wait until p2pd has ended, whether through `close` or not, and return the reason."""
        return await self.daemon.ended()

    async def open(
        self, peer: PeerId, lane: Lane, deadline_seconds: float, addresses: Sequence[str] = ()
    ) -> BoundedLink:
        """Open and return a new link. `addresses` are hints. A link to this peer itself does not leave the
        process. Raises PeerGone if the peer is not reached in time or this peer's p2pd has ended."""
        if self._closed or self.daemon.end_reason is not None:
            raise PeerGone(f"this peer's own p2pd is not running ({self.daemon.end_reason})")
        if peer == self.peer:
            slot = self._receiver_slot
            if slot.receiver is None:
                raise PeerGone("this peer does not listen yet")
            return LocalLink(
                peer=peer,
                lane=lane,
                receiver=slot.receiver,
                terms=slot.terms,
                backlog_bytes=self._backlog_bytes,
            )
        until = asyncio.get_running_loop().time() + deadline_seconds
        addresses = await self._resolve(addresses)
        seconds_left = max(0.0, until - asyncio.get_running_loop().time())
        stream = await self._dialling.stream(peer, protocol_name(lane), addresses, seconds_left)
        relayed = through_relay(stream.address)
        direct = [address for address in addresses if not is_circuit(address)]
        if relayed:  # No subflows, which need direct addresses: they would share the relay's bandwidth.
            direct = []
        link = P2pdLink(
            peer=peer,
            lane=lane,
            stream=(stream.reader, stream.writer),
            ended=self._link_ended,
            slow=self._subflow_dialer.want,
            addresses=direct,
            backlog_bytes=self._backlog_bytes,
            upload=self.upload,
        )
        self._links.add(link)
        if relayed:
            self._dialling.leave_circuit(peer, link)
        return link

    async def _resolve(self, addresses: Sequence[str]) -> tuple[str, ...]:
        return await resolve_dialable(addresses, self.daemon.addresses)

    def _link_ended(self, link: P2pdLink, reason: str, error: WireError | None) -> None:
        """Handle the end of a link that this peer opened, and notify the receiver unless this peer closed the
        link: then `reason` is empty. `error` is set if the other side violated the protocol."""
        self._links.discard(link)
        self._subflow_dialer.forget(link)
        if not self._closed:
            task = asyncio.create_task(link.gone())  # Kept, so that `close` can wait for it.
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        if self._closed or not reason:
            return
        if error is not None:
            self._refuse(self._receiver_slot, link.peer, error)
        elif self._receiver_slot.receiver is not None:
            self._receiver_slot.receiver.lost(link.peer, link.lane, reason)

    async def _accept(
        self, lane: Lane, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a link that another peer opened: read it to its end, then notify the receiver. `info.peer_id`
        is authentic (libp2p's handshake). Streams that exceed the limits are refused."""
        peer = PeerId(info.peer_id.to_base58())
        slot = self._receiver_slot
        if slot.receiver is None or self._closed:
            writer.transport.abort()
            return
        with self._admitted(peer, writer, slot) as admitted:
            if not admitted:
                reason = f"{self._per_peer[peer]} links of this peer are open already"
                self._refuse(slot, peer, Backlog(reason))
                return
            self._origin_addresses[peer] = str(info.addr)
            subflows = self._subflows.setdefault(peer, _Subflows()) if lane in ACKNOWLEDGED else None
            if subflows is not None:
                subflows.links += 1  # While there are links, the peer's carriers may open subflows.
            error, reason = await StreamReader(
                intake=self._intake, slot=slot, peer=peer, lane=lane, stream=(reader, writer)
            ).read()
        if subflows is not None:
            self._cut_subflows(peer, subflows)
        if error is not None:
            self._refuse(slot, peer, error)
        elif not self._closed and slot.receiver is not None:
            slot.receiver.lost(peer, lane, reason)

    @staticmethod
    def _refuse(slot: ReceiverSlot, peer: PeerId, error: WireError) -> None:
        """Report to the receiver, if there still is one, that a peer was refused for `error`."""
        if slot.receiver is not None:
            slot.receiver.refused(peer, error.code, str(error))

    async def _accept_subflow(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a subflow that a carrier opened: check which peer the carrier acts for, and read the messages
        as that peer's. If that peer has no link to this one, or too many subflows, the stream is cut."""
        carrier, slot = PeerId(info.peer_id.to_base58()), self._receiver_slot
        if slot.receiver is None or self._closed:
            writer.transport.abort()
            return
        peer = carrier  # Until the introduction names the peer, errors are reported for the carrier.
        try:
            with self._admitted(carrier, writer, ReceiverSlot()) as admitted:
                if not admitted:
                    raise Backlog(f"{self._per_peer[carrier]} streams of this carrier are open already")
                async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                    shown = await reader.readexactly(INTRODUCTION_BYTES)
                peer = carried_peer(shown, carrier, self.peer)
                subflows = self._subflows.get(peer)
                if subflows is None or len(subflows.writers) >= MAX_SUBFLOWS:
                    return
                subflows.writers.add(writer)
                stream = (reader, writer)
                try:
                    reading = StreamReader(
                        intake=self._intake, slot=slot, peer=peer, lane="data", stream=stream, introduced=True
                    )
                    error, _ = await reading.read()
                finally:
                    subflows.writers.discard(writer)
        except DAEMON_ERRORS:
            return  # The carrier has gone, or sends no introduction.
        except WireError as refused:
            error = refused
        if error is not None and not self._closed:
            self._refuse(slot, peer, error)

    @contextlib.contextmanager
    def _admitted(self, peer: PeerId, writer: asyncio.StreamWriter, slot: ReceiverSlot) -> Iterator[bool]:
        """Count an accepted stream of `peer` within the context, and cut it at the end. Yields False, without
        counting it, if too many are open: of this peer, of strangers, or in all."""
        task = asyncio.current_task()
        max_streams = STREAMS_PER_PEER
        is_full = len(self._accepted) >= STREAMS
        if not slot.terms.greeted(peer):
            max_streams = STREAMS_PER_STRANGER
            is_full = is_full or self._stranger_streams() >= STREAMS_OF_STRANGERS
        try:
            if task is None or self._per_peer[peer] >= max_streams or is_full:
                yield False
                return
            self._accepted[task] = (peer, slot, writer)
            self._per_peer[peer] += 1
            try:
                yield True
            finally:
                del self._accepted[task]
                self._per_peer[peer] -= 1
                if not self._per_peer[peer]:
                    del self._per_peer[peer]
                    self._origin_addresses.pop(peer, None)
        finally:
            writer.transport.abort()

    def _stranger_streams(self) -> int:
        """Return the number of open streams of peers that have not sent `Hello`."""
        return sum(not slot.terms.greeted(peer) for peer, slot, _ in self._accepted.values())

    def _cut_subflows(self, peer: PeerId, subflows: _Subflows) -> None:
        """Count that a link of the peer has ended. The subflows are cut with the last one."""
        subflows.links -= 1
        if subflows.links == 0:
            del self._subflows[peer]
            for writer in subflows.writers:
                writer.transport.abort()

    def _drop_accepted(self) -> list[asyncio.Task[Any]]:
        """Cut all accepted streams, and return their tasks. These then end; cancelled tasks would warn."""
        for *_, writer in self._accepted.values():
            writer.transport.abort()
        return list(self._accepted)

    async def _supervise(self) -> None:
        """End all links when p2pd has ended."""
        reason = await self.daemon.ended()
        for link in list(self._links):
            link.fail(reason)
        self._drop_accepted()

    async def close(self) -> None:
        """End all links and p2pd. May be called more than once."""
        if self._closed:
            return
        links = list(self._links)
        for link in links:
            link.close()
        self._closed = True
        self._intake.closed = True
        accepted = self._drop_accepted()
        self.chunks.close()
        await self._dialling.close()
        await self.relays.close()
        await self.circuits.close()
        await self._subflow_dialer.close()
        for service in self.checks:
            await service.close()
        await asyncio.gather(*(link.gone() for link in links), *self._ending, return_exceptions=True)
        await asyncio.gather(*accepted, return_exceptions=True)
        await self.daemon.stop()
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
