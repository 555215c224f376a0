"""An in-memory transport: links between peers of one process, on any event loop's clock.

It is meant for tests and the simulator, and uses only the loop's time and timers. On a virtual-clock loop
with a seeded `random.Random`, the seed reproduces a whole swarm and its faults. Every message is framed,
guarded and decoded by the code that p2pd's links use. Peers therefore share no object, and byte counts are
those of the wire. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from random import Random

from protocols.errors import PeerGone, WireError
from protocols.fields import Body
from protocols.framing.frames import wire_bytes
from protocols.framing.intake import Intake
from protocols.framing.send_queue import BACKLOG_BYTES, LocalLink, QueuedLink, ReceiverSlot, deliver
from protocols.memory.conditions import Conditions, SimulatedLink, Timers, Way
from protocols.memory.directory import MemoryDirectory
from protocols.messages.table import Lane, Message, encode
from protocols.messages.terms import ANYTHING, Terms
from protocols.ports import Arrived, FindChunk, Progressed, Receiver
from protocols.signed.orders import SignedOrder
from swarmnet.identifiers import PeerId, RunId

DEAD_PATH_SECONDS = 39.0
"""libp2p resets a connection after this long without a working path (measured)."""


class MemoryLink(QueuedLink):
    """A link inside a `MemoryNetwork`."""

    def __init__(
        self,
        network: MemoryNetwork,
        source: MemoryTransport,
        target: MemoryTransport,
        lane: Lane,
        way: Way[MemoryLink],
    ) -> None:
        super().__init__(target.peer, lane, source.backlog_bytes)
        self.source, self.target, self.way = source, target, way
        self._network = network
        self._inflow = target.intake.open(source.peer, target.ear, self._cut)
        self._timers = network.timers
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._arrivals: deque[Callable[[], None]] = deque()
        self._arrival = 0.0
        self._damage = 0
        self._inbound_open = True

    def post(self, message: Message, body: Body = b"") -> int:
        """Queue a message and return its size on the wire in bytes. The simulated conditions may lose, repeat
        or delay it. Raises PeerGone if the link has ended, and Backlog if too many bytes are queued."""
        conditions = self.way.conditions
        if self.closed or not conditions.faulty:
            return super().post(message, body)
        random = self._network.random
        if random.random() < conditions.lost:
            return wire_bytes(len(encode(message)), len(body))
        if random.random() < conditions.reordered:
            delay = max(conditions.latency_seconds, 0.001)
            self._timers.later(delay, self._post_late, message, bytes(body))
            return wire_bytes(len(encode(message)), len(body))
        if random.random() < conditions.repeated:
            super().post(message, body)
        self._damage += random.random() < conditions.corrupted
        return super().post(message, body)

    def _post_late(self, message: Message, body: bytes) -> None:
        if not self.closed:
            super().post(message, body)

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._timers.soon(self.send)

    def send(self) -> None:
        """Send the most urgent piece, and schedule the next one for when the channel is free."""
        self._scheduled = False
        if self.closed or self.way.blocked or self.source.frozen or self.target.frozen:
            return  # unfreezing or unblocking calls this again
        now = self._loop.time()
        line, uplink = self.way.line, self.source.uplink
        speed = min(line.bytes_per_second, uplink.bytes_per_second)
        free = max(now, line.busy_until, uplink.busy_until)
        if free > now:
            self._scheduled = True
            self._timers.at(free, self.send)
            return
        taken: list[bytes] = []
        while self.queued_bytes and (piece := self._take()) is not None:
            taken.append(self._damaged(piece) if self._damage else piece)
            if speed != float("inf"):
                break
        if not taken:
            return
        data = b"".join(taken)
        done = now + len(data) / speed
        line.busy_until = now + len(data) / line.bytes_per_second
        uplink.busy_until = now + len(data) / uplink.bytes_per_second  # A slow channel leaves it to others.
        self.arrive(done + self.way.conditions.latency_seconds, lambda: self._receive(data))
        if self.queued_bytes:
            self._scheduled = True
            self._timers.at(done, self.send)

    def _damaged(self, piece: bytes) -> bytes:
        self._damage -= 1
        damaged = bytearray(piece)
        damaged[self._network.random.randrange(len(piece))] ^= 1 << self._network.random.randrange(8)
        return bytes(damaged)

    def arrive(self, when: float, what: Callable[[], None]) -> None:
        """Do `what` at the other side at time `when`, but after all earlier arrivals on this link."""
        self._arrival = max(self._arrival, when)
        self._arrivals.append(what)
        self._timers.at(self._arrival, self._next_arrival)

    def _next_arrival(self) -> None:
        self._network.deliver(self.target, self._arrivals.popleft(), self.way)

    def _receive(self, data: bytes) -> None:
        """Deliver data to the target, or refuse the link for it."""
        receiver = self.target.receiver
        if not self._inbound_open or receiver is None:
            return
        error = deliver(receiver, self.source.peer, self.lane, self._inflow.frames.take(data))
        if error is None:
            self._inflow.count()
        elif self._inbound_open:
            self._refuse(receiver, error)

    def _refuse(self, receiver: Receiver, error: WireError) -> None:
        self._end_inflow()
        receiver.refused(self.source.peer, error.code, str(error))
        self._network.end_from_target(self, "it ended")

    def _cut(self) -> None:
        """Refuse the link, because its sender has too many unfinished bytes here."""
        if self._inbound_open and self.target.receiver is not None and self._inflow.error is not None:
            self._refuse(self.target.receiver, self._inflow.error)

    def _end_inflow(self) -> None:
        if self._inbound_open:
            self._inbound_open = False
            self._inflow.end()

    def inject(self, data: bytes) -> None:
        """Send raw bytes that no honest peer would send."""
        self.arrive(self._loop.time() + self.way.conditions.latency_seconds, lambda: self._receive(data))

    def close(self) -> None:
        if self._finish("closed by us"):
            self.way.links.pop(self, None)
            when = self._loop.time() + self.way.conditions.latency_seconds
            self.arrive(when, lambda: self.end_inbound("closed by the other side"))

    def end_inbound(self, reason: str) -> None:
        """Notify the receiving side that the link has ended."""
        if self._inbound_open:
            self._end_inflow()
            if self.target.receiver is not None:
                self.target.receiver.lost(self.source.peer, self.lane, reason)

    def end_outbound(self, reason: str) -> None:
        """Notify the sending side that the link has ended."""
        self._end_inflow()
        if self._finish(reason):
            self.way.links.pop(self, None)
            if self.source.receiver is not None:
                self.source.receiver.lost(self.target.peer, self.lane, reason)


class MemoryTransport:
    """A `Transport` inside a `MemoryNetwork`. Create it with `MemoryNetwork.transport`."""

    def __init__(self, network: MemoryNetwork, peer: PeerId, backlog_bytes: int) -> None:
        self.peer, self.backlog_bytes = peer, backlog_bytes
        self.ear = ReceiverSlot()
        self.intake = Intake()
        self.subflows: dict[str, int] = {}
        self.uplink = SimulatedLink()
        self.frozen = False
        self.closed = False
        self.held: list[Callable[[], None]] = []
        self._context = copy_context()
        self._network = network

    @property
    def addresses(self) -> Sequence[str]:
        return (f"/memory/{self.peer}",)

    def seen_range(self, peer: PeerId) -> str:
        """Return the address range that the test has set for this peer; empty if there is none."""
        return self._network.seen_ranges.get(peer, "")

    def when_moved(self, told: Callable[[], None]) -> None:
        """Do nothing: an in-memory address never changes."""

    @property
    def receiver(self) -> Receiver | None:
        return self.ear.receiver

    def listen(self, receiver: Receiver, terms: Terms = ANYTHING) -> None:
        self.ear.receiver, self.ear.terms = receiver, terms
        self._context = copy_context()

    def receive(self, what: Callable[[], None]) -> None:
        """Do `what` as this peer, in the context in which it listens. If the peer is frozen, it waits for
        `thaw`."""
        if self.frozen:
            self.held.append(what)
        else:
            self._context.run(what)

    def serve_chunks(self, find: FindChunk) -> None:
        """Do nothing: no peer has extra connections here that would request chunks."""

    async def carriers(self, count: int, arrived: Arrived, progressed: Progressed) -> None:
        """Return None: one link already carries everything."""

    async def open(
        self, peer: PeerId, lane: Lane, deadline_seconds: float, addresses: Sequence[str] = ()
    ) -> QueuedLink:
        """Open and return a new link. This takes one round trip if there is no link to the peer yet,
        otherwise no time. Raises PeerGone if the peer is not reached in time."""
        if self.closed:
            raise PeerGone("this peer's own transport is closed")
        if peer == self.peer:
            if self.receiver is None:
                raise PeerGone("this peer does not listen yet")
            return LocalLink(peer, lane, self.receiver, self.ear.terms, self.backlog_bytes)
        way, back = self._network.way(self.peer, peer), self._network.way(peer, self.peer)
        if not way.links:
            round_trip = way.conditions.latency_seconds + back.conditions.latency_seconds
            await asyncio.sleep(min(round_trip, deadline_seconds))
            if way.blocked or back.blocked or round_trip > deadline_seconds:
                await asyncio.sleep(deadline_seconds - min(round_trip, deadline_seconds))
                raise PeerGone(f"{peer} does not answer within {deadline_seconds:g} s")
        target = self._network.transports.get(peer)
        if target is None or target.receiver is None or target.closed:
            raise PeerGone(f"{peer} refuses: nothing listens there")
        link = MemoryLink(self._network, self, target, lane, way)
        way.links[link] = None
        return link

    async def close(self) -> None:
        """End all links. The other peers notice after the latency."""
        if not self.closed:
            self.closed = True
            self._network.remove(self, "it ended")


class MemoryNetwork:
    """All peers of one simulated network, and the faults that happen to them."""

    def __init__(self, random: Random | None = None, conditions: Conditions | None = None) -> None:
        self.timers = Timers()
        self.random = random if random is not None else Random(0)
        self.conditions = conditions if conditions is not None else Conditions()
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.seen_ranges: dict[PeerId, str] = {}
        """The address range in which a test places each peer; see `Transport.seen_range`."""
        self.records: dict[tuple[RunId, int], dict[PeerId, bytes]] = {}
        self.manifests: dict[RunId, bytes] = {}
        self.orders: dict[tuple[RunId, PeerId], SignedOrder] = {}
        self.listings: set[RunId] = set()
        self._ways: dict[tuple[PeerId, PeerId], Way[MemoryLink]] = {}

    def directory(self, peer: PeerId) -> MemoryDirectory:
        return MemoryDirectory(self, peer)

    def transport(
        self,
        peer: PeerId,
        *,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> MemoryTransport:
        """Add a peer, or restore one after `crash` or `close`."""
        old = self.transports.get(peer)
        if old is not None and not old.closed:
            raise ValueError(f"{peer} is in this network already")
        self.transports[peer] = MemoryTransport(self, peer, backlog_bytes)
        return self.transports[peer]

    def way(self, source: PeerId, target: PeerId) -> Way[MemoryLink]:
        way = self._ways.get((source, target))
        if way is None:
            way = self._ways[source, target] = Way(self.conditions)
            way.line.bytes_per_second = self.conditions.bytes_per_second
        return way

    def set(self, source: PeerId, target: PeerId, conditions: Conditions) -> None:
        """Change the conditions of one direction. Data in transit is not affected."""
        way = self.way(source, target)
        way.conditions = conditions
        way.line.bytes_per_second = conditions.bytes_per_second

    def block(self, source: PeerId, target: PeerId) -> None:
        """Block the direction from `source` to `target`. Peers notice after `DEAD_PATH_SECONDS` at the
        earliest."""
        way = self.way(source, target)
        if not way.blocked:
            way.blocked = True
            way.blocked_count += 1
            self.timers.later(DEAD_PATH_SECONDS, self._dead_path, source, target, way.blocked_count)

    def unblock(self, source: PeerId, target: PeerId) -> None:
        """Unblock the direction. Held deliveries arrive in order."""
        way = self.way(source, target)
        if way.blocked:
            way.blocked = False
            held, way.held = way.held, []
            receiver = self.transports[target]
            for what in held:
                self.deliver(receiver, what, way)
            for link in list(way.links):
                link.send()

    def partition(self, *groups: Iterable[PeerId]) -> None:
        """Block all directions between peers of different groups."""
        sides = [list(group) for group in groups]
        for side in sides:
            for other in sides:
                for source in side if side is not other else ():
                    for target in other:
                        self.block(source, target)

    def heal(self) -> None:
        """Unblock everything."""
        for source, target in list(self._ways):
            self.unblock(source, target)

    def freeze(self, peer: PeerId) -> None:
        """Freeze the peer's process (SIGSTOP). Nothing leaves or reaches it, and no peer is notified."""
        self.transports[peer].frozen = True

    def thaw(self, peer: PeerId) -> None:
        """Resume a frozen process, and deliver what arrived for it meanwhile."""
        transport = self.transports[peer]
        transport.frozen = False
        held, transport.held = transport.held, []
        for what in held:
            transport.receive(what)
        for link in self._links_of(transport):
            link.send()

    def crash(self, peer: PeerId) -> None:
        """Kill the peer's process (SIGKILL). Other peers notice after the latency; the peer itself does
        not."""
        transport = self.transports[peer]
        transport.closed = True
        transport.ear.close()
        self.remove(transport, "it ended")

    def remove(self, transport: MemoryTransport, reason: str) -> None:
        """End all links from and to a transport, for the given reason.

        A link that it opened ends on its side at once, and on the other side after the direction's latency. A
        link that another peer opened ends from the receiving side (`end_from_target`)."""
        now = asyncio.get_running_loop().time()
        for link in self._links_of(transport):
            if link.source is transport:
                link._finish(reason)
                link.way.links.pop(link, None)
                link.arrive(now + link.way.conditions.latency_seconds, _inbound_end(link, reason))
            else:
                self.end_from_target(link, reason)

    def end_from_target(self, link: MemoryLink, reason: str) -> None:
        """End a link from the receiving side. Its sender notices after the latency."""
        back = self.way(link.target.peer, link.source.peer)
        self.timers.later(
            back.conditions.latency_seconds,
            lambda: self.deliver(link.source, lambda: link.end_outbound(reason), back),
        )

    def deliver(self, transport: MemoryTransport, what: Callable[[], None], way: Way[MemoryLink]) -> None:
        """Do `what` at a peer as soon as the way to it is open and it is not frozen."""
        if way.blocked:
            way.held.append(what)
        else:
            transport.receive(what)

    def inject(self, source: PeerId, target: PeerId, lane: Lane, data: bytes) -> None:
        """Open a link from `source` and send raw bytes on it that no honest peer would send."""
        way = self.way(source, target)
        link = MemoryLink(self, self.transports[source], self.transports[target], lane, way)
        link.inject(data)

    def _links_of(self, transport: MemoryTransport) -> list[MemoryLink]:
        return [
            link
            for way in self._ways.values()
            for link in list(way.links)
            if transport in (link.source, link.target)
        ]

    def _dead_path(self, source: PeerId, target: PeerId, blocked_count: int) -> None:
        """End all links of a direction that is still blocked since this count, as libp2p does."""
        way = self.way(source, target)
        if not way.blocked or way.blocked_count != blocked_count:
            return
        for direction in (way, self.way(target, source)):
            direction.held.clear()
            for link in list(direction.links):
                link.target.receive(_inbound_end(link, "the path is dead"))
                link.source.receive(lambda link=link: link.end_outbound("the path is dead"))  # type: ignore[misc]


def _inbound_end(link: MemoryLink, reason: str) -> Callable[[], None]:
    return lambda: link.end_inbound(reason)
