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
from protocols.memory.conditions import Conditions, Direction, SimulatedLink, Timers
from protocols.memory.directory import MemoryDirectory
from protocols.messages.table import Lane, Message, encode
from protocols.messages.terms import ANYTHING, Terms
from protocols.ports import Arrived, FindChunk, FindText, Progressed, Receiver
from protocols.signed.opinions import SignedOpinion
from protocols.signed.orders import SignedOrder
from swarmnet.identifiers import PeerId, RunId

DEAD_PATH_SECONDS = 39.0
"""libp2p resets a connection after this long without a working path (measured)."""


class MemoryLink(QueuedLink):
    """A link inside a `MemoryNetwork`. One object has both ends: `source` sends and `target` receives. Data
    travels in `direction`, which all links from `source` to `target` share."""

    def __init__(
        self,
        *,
        network: MemoryNetwork,
        source: MemoryTransport,
        target: MemoryTransport,
        lane: Lane,
        direction: Direction[MemoryLink],
    ) -> None:
        """Create a link that is open at both ends."""
        super().__init__(target.peer, lane, source.backlog_bytes)
        self.source = source
        self.target = target
        self.direction = direction
        self._network = network
        self._inflow = target.intake.open(source.peer, target.ear, self._cut)
        self._timers = network.timers
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._arrivals: deque[Callable[[], None]] = deque()
        """What happens at the target, in order."""
        self._last_arrival = 0.0
        self._pieces_to_corrupt = 0
        self._inbound_open = True
        """Whether the target still accepts data."""

    def post(self, message: Message, body: Body = b"") -> int:
        """Queue a message and return its size on the wire in bytes. The simulated conditions may lose, delay,
        repeat or corrupt it. Raises PeerGone if the link has ended, and Backlog if too much is queued."""
        conditions = self.direction.conditions
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
        if random.random() < conditions.corrupted:
            self._pieces_to_corrupt += 1
        return super().post(message, body)

    def _post_late(self, message: Message, body: bytes) -> None:
        if not self.closed:
            super().post(message, body)

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._timers.soon(self.send)

    def send(self) -> None:
        """Send the most urgent piece, and schedule this method for the next. If the channel (the direction
        between the two peers) or the sender's uplink is busy, only schedule it. With unlimited speed, send
        all pieces at once. While the direction is blocked or a peer is frozen, send nothing."""
        self._scheduled = False
        if self.closed or self.direction.blocked or self.source.frozen or self.target.frozen:
            return  # unfreezing or unblocking calls this again
        now = self._loop.time()
        channel, uplink = self.direction.channel, self.source.uplink
        speed = min(channel.bytes_per_second, uplink.bytes_per_second)
        free_at = max(now, channel.busy_until, uplink.busy_until)
        if free_at > now:
            self._scheduled = True
            self._timers.at(free_at, self.send)
            return
        pieces: list[bytes] = []
        while self.queued_bytes and (piece := self._take()) is not None:
            pieces.append(self._corrupted(piece) if self._pieces_to_corrupt else piece)
            if speed != float("inf"):
                break  # Only one piece at a time.
        if not pieces:
            return
        data = b"".join(pieces)
        sent_at = now + len(data) / speed
        channel.busy_until = now + len(data) / channel.bytes_per_second
        # A fast uplink is free for other links while this data still travels through a slow channel.
        uplink.busy_until = now + len(data) / uplink.bytes_per_second
        self.arrive(sent_at + self.direction.conditions.latency_seconds, lambda: self._receive(data))
        if self.queued_bytes:
            self._scheduled = True
            self._timers.at(sent_at, self.send)

    def _corrupted(self, piece: bytes) -> bytes:
        """Return a copy of `piece` in which one random bit is flipped."""
        self._pieces_to_corrupt -= 1
        corrupted = bytearray(piece)
        corrupted[self._network.random.randrange(len(piece))] ^= 1 << self._network.random.randrange(8)
        return bytes(corrupted)

    def arrive(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at the target at time `when`, but after all earlier arrivals on this link."""
        self._last_arrival = max(self._last_arrival, when)
        self._arrivals.append(action)
        self._timers.at(self._last_arrival, self._next_arrival)

    def _next_arrival(self) -> None:
        self._network.deliver(self.target, self._arrivals.popleft(), self.direction)

    def _receive(self, data: bytes) -> None:
        """Deliver the messages in `data` to the target's receiver. End the link if one is refused."""
        receiver = self.target.receiver
        if not self._inbound_open or receiver is None:
            return
        error = deliver(receiver, self.source.peer, self.lane, self._inflow.frames.take(data))
        if error is None:
            self._inflow.count()
        elif self._inbound_open:
            self._refuse(receiver, error)

    def _refuse(self, receiver: Receiver, error: WireError) -> None:
        """End the link from the target's side because of `error`, and report that to its receiver."""
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
        when = self._loop.time() + self.direction.conditions.latency_seconds
        self.arrive(when, lambda: self._receive(data))

    def close(self) -> None:
        """End the link from the source's side. The target notices after the latency."""
        if self._finish("closed by us"):
            self.direction.links.pop(self, None)
            when = self._loop.time() + self.direction.conditions.latency_seconds
            self.arrive(when, lambda: self.end_inbound("closed by the other side"))

    def end_inbound(self, reason: str) -> None:
        """End the target's side of the link, and notify its receiver."""
        if self._inbound_open:
            self._end_inflow()
            if self.target.receiver is not None:
                self.target.receiver.lost(self.source.peer, self.lane, reason)

    def end_outbound(self, reason: str) -> None:
        """End both sides of the link, and notify the source's receiver."""
        self._end_inflow()
        if self._finish(reason):
            self.direction.links.pop(self, None)
            if self.source.receiver is not None:
                self.source.receiver.lost(self.target.peer, self.lane, reason)


class MemoryTransport:
    """A `Transport` inside a `MemoryNetwork`. Create it with `MemoryNetwork.transport`."""

    def __init__(self, network: MemoryNetwork, peer: PeerId, backlog_bytes: int) -> None:
        """Create the transport of `peer`. Each of its links queues at most `backlog_bytes` bytes."""
        self.peer = peer
        self.backlog_bytes = backlog_bytes
        self.ear = ReceiverSlot()
        self.intake = Intake()
        self.subflows: dict[str, int] = {}
        self.uplink = SimulatedLink()
        self.frozen = False
        self.closed = False
        self.held: list[Callable[[], None]] = []
        """What arrived while the peer was frozen: calls that `thaw` makes."""
        self._context = copy_context()
        self._network = network

    @property
    def addresses(self) -> Sequence[str]:
        return (f"/memory/{self.peer}",)

    def seen_range(self, peer: PeerId) -> str:
        """Return the address range that the test has set for this peer; empty if there is none."""
        return self._network.seen_ranges.get(peer, "")

    def on_address_change(self, told: Callable[[], None]) -> None:
        """Do nothing: an in-memory address never changes."""

    @property
    def receiver(self) -> Receiver | None:
        return self.ear.receiver

    def listen(self, receiver: Receiver, terms: Terms = ANYTHING) -> None:
        self.ear.receiver = receiver
        self.ear.terms = terms
        self._context = copy_context()

    def receive(self, action: Callable[[], None]) -> None:
        """Call `action` as this peer, in its own context variables. A frozen peer does so at `thaw`."""
        if self.frozen:
            self.held.append(action)
        else:
            self._context.run(action)

    def serve_chunks(self, find: FindChunk) -> None:
        """Do nothing: no peer has extra connections here that would request chunks."""

    def serve_text(self, find: FindText) -> None:
        """Do nothing, likewise."""

    async def carriers(self, count: int, arrived: Arrived, progressed: Progressed) -> None:
        """Return None: one link already carries everything."""

    async def open(
        self, peer: PeerId, lane: Lane, deadline_seconds: float, addresses: Sequence[str] = ()
    ) -> QueuedLink:
        """Open and return a new link. This takes one round trip if there is no link to the peer yet,
        otherwise no time. A link to this peer itself is a `LocalLink`. Raises PeerGone if the peer does not
        listen, if it is not reached in `deadline_seconds`, or if this transport is closed."""
        if self.closed:
            raise PeerGone("this peer's own transport is closed")
        if peer == self.peer:
            if self.receiver is None:
                raise PeerGone("this peer does not listen yet")
            return LocalLink(
                peer=peer,
                lane=lane,
                receiver=self.receiver,
                terms=self.ear.terms,
                backlog_bytes=self.backlog_bytes,
            )
        there, back = self._network.direction(self.peer, peer), self._network.direction(peer, self.peer)
        if not there.links:
            round_trip = there.conditions.latency_seconds + back.conditions.latency_seconds
            await asyncio.sleep(min(round_trip, deadline_seconds))
            if there.blocked or back.blocked or round_trip > deadline_seconds:
                await asyncio.sleep(deadline_seconds - min(round_trip, deadline_seconds))  # The rest of it.
                raise PeerGone(f"{peer} does not answer within {deadline_seconds:g} s")
        target = self._network.transports.get(peer)
        if target is None or target.receiver is None or target.closed:
            raise PeerGone(f"{peer} refuses: nothing listens there")
        link = MemoryLink(network=self._network, source=self, target=target, lane=lane, direction=there)
        there.links[link] = None
        return link

    async def close(self) -> None:
        """End all links. The other peers notice after the latency."""
        if not self.closed:
            self.closed = True
            self._network.remove(self, "it ended")


class MemoryNetwork:
    """All peers of one simulated network, and the faults that happen to them."""

    def __init__(self, random: Random | None = None, conditions: Conditions | None = None) -> None:
        """Create a network without peers. `random` draws faults; `conditions` are those of all directions."""
        self.timers = Timers()
        self.random = random if random is not None else Random(0)
        self.conditions = conditions if conditions is not None else Conditions()
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.seen_ranges: dict[PeerId, str] = {}
        """The address range in which a test places each peer, as other peers see it."""
        self.records: dict[tuple[RunId, int], dict[PeerId, bytes]] = {}
        """Maps (run, stage) to the signed record of each peer. This and the next three are the directory."""
        self.manifests: dict[RunId, bytes] = {}
        self.orders: dict[tuple[RunId, PeerId], SignedOrder] = {}
        self.listings: set[RunId] = set()
        self.opinions: dict[str, SignedOpinion] = {}
        """Maps subkey to the newest opinion."""
        self._directions: dict[tuple[PeerId, PeerId], Direction[MemoryLink]] = {}

    def directory(self, peer: PeerId) -> MemoryDirectory:
        return MemoryDirectory(self, peer)

    def transport(
        self,
        peer: PeerId,
        *,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> MemoryTransport:
        """Return a new transport for a peer, also after `crash` or `close`. ValueError if one is open."""
        old = self.transports.get(peer)
        if old is not None and not old.closed:
            raise ValueError(f"{peer} is in this network already")
        self.transports[peer] = MemoryTransport(self, peer, backlog_bytes)
        return self.transports[peer]

    def direction(self, source: PeerId, target: PeerId) -> Direction[MemoryLink]:
        """Return the direction from `source` to `target`. It is created at its first use."""
        direction = self._directions.get((source, target))
        if direction is None:
            direction = Direction(self.conditions)
            self._directions[source, target] = direction
            direction.channel.bytes_per_second = self.conditions.bytes_per_second
        return direction

    def set(self, source: PeerId, target: PeerId, conditions: Conditions) -> None:
        """Change the conditions of one direction. Data in transit is not affected."""
        direction = self.direction(source, target)
        direction.conditions = conditions
        direction.channel.bytes_per_second = conditions.bytes_per_second

    def block(self, source: PeerId, target: PeerId) -> None:
        """Block the direction. After `DEAD_PATH_SECONDS` of that, all links between the two peers end."""
        direction = self.direction(source, target)
        if not direction.blocked:
            direction.blocked = True
            direction.blocked_count += 1
            count = direction.blocked_count
            self.timers.later(DEAD_PATH_SECONDS, self._end_dead_links, source, target, count)

    def unblock(self, source: PeerId, target: PeerId) -> None:
        """Unblock the direction. What was held in it arrives in order, and its links send again."""
        direction = self.direction(source, target)
        if direction.blocked:
            direction.blocked = False
            held, direction.held = direction.held, []
            receiver = self.transports[target]
            for action in held:
                self.deliver(receiver, action, direction)
            for link in list(direction.links):
                link.send()

    def partition(self, *groups: Iterable[PeerId]) -> None:
        """Block all directions between peers of different groups."""
        sides = [list(group) for group in groups]
        for side in sides:
            for other in sides:
                if side is other:
                    continue
                for source in side:
                    for target in other:
                        self.block(source, target)

    def heal(self) -> None:
        """Unblock everything."""
        for source, target in list(self._directions):
            self.unblock(source, target)

    def freeze(self, peer: PeerId) -> None:
        """Freeze the peer's process (SIGSTOP). Nothing leaves or reaches it, and no peer is notified."""
        self.transports[peer].frozen = True

    def thaw(self, peer: PeerId) -> None:
        """Resume a frozen process: deliver what arrived for it meanwhile, and let its links send again."""
        transport = self.transports[peer]
        transport.frozen = False
        held, transport.held = transport.held, []
        for action in held:
            transport.receive(action)
        for link in self._links_of(transport):
            link.send()

    def crash(self, peer: PeerId) -> None:
        """Kill the peer's process (SIGKILL). Other peers notice after the latency; the peer itself never."""
        transport = self.transports[peer]
        transport.closed = True
        transport.ear.close()
        self.remove(transport, "it ended")

    def remove(self, transport: MemoryTransport, reason: str) -> None:
        """End all links from and to a peer's transport, for the given reason. A link that this peer opened
        ends on its side at once, and on the other side after the direction's latency. A link that another
        peer opened ends on that peer's side after the latency (`end_from_target`)."""
        now = asyncio.get_running_loop().time()
        for link in self._links_of(transport):
            if link.source is transport:
                link._finish(reason)
                link.direction.links.pop(link, None)
                link.arrive(now + link.direction.conditions.latency_seconds, _inbound_end(link, reason))
            else:
                self.end_from_target(link, reason)

    def end_from_target(self, link: MemoryLink, reason: str) -> None:
        """End a link from the receiving side. Its sender notices after the latency."""
        back = self.direction(link.target.peer, link.source.peer)
        self.timers.later(
            back.conditions.latency_seconds,
            lambda: self.deliver(link.source, lambda: link.end_outbound(reason), back),
        )

    def deliver(
        self, transport: MemoryTransport, action: Callable[[], None], direction: Direction[MemoryLink]
    ) -> None:
        """Call `action` at a peer as soon as it is not frozen and the direction to it is not blocked."""
        if direction.blocked:
            direction.held.append(action)
        else:
            transport.receive(action)

    def inject(self, source: PeerId, target: PeerId, lane: Lane, data: bytes) -> None:
        """Open a link from `source` and send raw bytes on it that no honest peer would send."""
        direction = self.direction(source, target)
        link = MemoryLink(
            network=self,
            source=self.transports[source],
            target=self.transports[target],
            lane=lane,
            direction=direction,
        )
        link.inject(data)

    def _links_of(self, transport: MemoryTransport) -> list[MemoryLink]:
        """Return the open links from and to a peer's transport."""
        return [
            link
            for direction in self._directions.values()
            for link in list(direction.links)
            if transport in (link.source, link.target)
        ]

    def _end_dead_links(self, source: PeerId, target: PeerId, blocked_count: int) -> None:
        """End all links between two peers, as libp2p does after `DEAD_PATH_SECONDS` without a path. Does
        nothing if the direction was unblocked since it was blocked for the `blocked_count`-th time."""
        blocked = self.direction(source, target)
        if not blocked.blocked or blocked.blocked_count != blocked_count:
            return
        for direction in (blocked, self.direction(target, source)):
            direction.held.clear()
            for link in list(direction.links):
                link.target.receive(_inbound_end(link, "the path is dead"))
                link.source.receive(lambda link=link: link.end_outbound("the path is dead"))  # type: ignore[misc]


def _inbound_end(link: MemoryLink, reason: str) -> Callable[[], None]:
    return lambda: link.end_inbound(reason)
