"""The common part of all transports' links: the send queue, its limit, and waiting until it drains."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable

from protocols.errors import Backlog, PeerGone, WireError
from protocols.fields import Body
from protocols.framing.frames import FrameReader, FrameWriter, Received
from protocols.messages.table import Lane, Message
from protocols.messages.terms import ANYTHING, Terms
from protocols.ports import Receiver
from swarmnet.identifiers import PeerId

BACKLOG_BYTES = 64 * 1024 * 1024
"""Maximum bytes queued on one link: 51 s of a 10 Mbit/s uplink. A slower receiver must be given less work."""


class BoundedLink:
    """Base class of all links: the queue limit, the end of the link, and waiting tasks. Not thread-safe."""

    def __init__(self, peer: PeerId, lane: Lane, backlog_bytes: int = BACKLOG_BYTES) -> None:
        """Create a link to `peer`. At most `backlog_bytes` bytes may be queued on it."""
        self.peer = peer
        self.lane = lane
        self._backlog_bytes = backlog_bytes
        self.closed = False
        self._end = ""
        """The reason why the link has ended."""
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        """Tasks in `drained`, each with the number of queued bytes that it waits for."""

    @property
    @abstractmethod
    def queued_bytes(self) -> int: ...

    def post(self, message: Message, body: Body = b"") -> int:
        """Queue a message and return its size on the wire in bytes. Raises PeerGone if the link has ended,
        and Backlog if too many bytes are queued."""
        if self.closed:
            raise PeerGone(f"the {self.lane} link to {self.peer} has ended: {self._end}")
        if self.queued_bytes + len(body) > self._backlog_bytes:
            raise Backlog(f"{self.queued_bytes} bytes wait on the {self.lane} link to {self.peer}")
        return self._queue(message, body)

    async def drained(self, below_bytes: int, deadline_seconds: float) -> None:
        if self.closed:
            raise PeerGone(f"the {self.lane} link to {self.peer} has ended: {self._end}")
        if self.queued_bytes <= below_bytes:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((below_bytes, waiter))
        try:
            await asyncio.wait_for(waiter, deadline_seconds)
        except TimeoutError:
            raise PeerGone(
                f"{self.queued_bytes} bytes still wait for {self.peer} after {deadline_seconds:g} s"
            ) from None

    def close(self) -> None:
        self._finish("closed by us")

    def _wake_waiters(self) -> None:
        """Wake the tasks in `drained` whose number of queued bytes is reached. Called for each sent piece."""
        if not self._waiters:
            return
        queued = self.queued_bytes
        for below_bytes, waiter in self._waiters:
            if queued <= below_bytes and not waiter.done():
                waiter.set_result(None)
        self._waiters = [(below, waiter) for below, waiter in self._waiters if not waiter.done()]

    def _finish(self, reason: str) -> bool:
        """End the link: drop the queue, and raise PeerGone in waiting tasks. False if it had ended before."""
        if self.closed:
            return False
        self.closed = True
        self._end = reason
        self._drop()
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(PeerGone(f"the {self.lane} link to {self.peer} has ended: {reason}"))
        self._waiters.clear()
        return True

    @abstractmethod
    def _queue(self, message: Message, body: Body) -> int:
        """Queue the message and return its size on the wire in bytes."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop what is queued."""


class QueuedLink(BoundedLink):
    """A link with one queue. A transport takes the pieces with `_take` and sends them."""

    def __init__(self, peer: PeerId, lane: Lane, backlog_bytes: int = BACKLOG_BYTES) -> None:
        super().__init__(peer, lane, backlog_bytes)
        self._writer = FrameWriter()

    @property
    def queued_bytes(self) -> int:
        return self._writer.queued_bytes

    def _queue(self, message: Message, body: Body) -> int:
        wire_bytes = self._writer.post(message, body)
        self._wake()
        return wire_bytes

    def _drop(self) -> None:
        self._writer.drop()

    def _take(self) -> bytes | None:
        """Return the next piece to send, or None."""
        piece = self._writer.next_piece()
        self._wake_waiters()
        return piece

    @abstractmethod
    def _wake(self) -> None:
        """Called when something was queued."""


class ReceiverSlot:
    """Holds the receiver of messages on links that other peers opened, until another receiver replaces it.
    Afterwards the slot is empty. Those links live until the other peers end them. Until then they must not
    keep the old receiver in memory, for instance a paused peer's stage."""

    def __init__(self, receiver: Receiver | None = None, terms: Terms = ANYTHING) -> None:
        self.receiver = receiver
        self.terms = terms

    def close(self) -> None:
        """Detach the receiver, because another one has replaced it."""
        self.receiver = None
        self.terms = ANYTHING


class LocalLink(QueuedLink):
    """A link from a peer to itself: libp2p refuses to dial itself, and routing code should not have to know.
    It delivers one piece in each iteration of the event loop, so that other tasks run in between."""

    def __init__(
        self,
        *,
        peer: PeerId,
        lane: Lane,
        receiver: Receiver,
        terms: Terms,
        backlog_bytes: int,
    ) -> None:
        """Create a link of `peer` to itself, which delivers to `receiver` within the limits of `terms`."""
        super().__init__(peer, lane, backlog_bytes)
        self._receiver = receiver
        self._reader = FrameReader(lambda message: terms.limit(peer, message))
        self._scheduled = False

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver_piece)

    def _deliver_piece(self) -> None:
        """Deliver the most urgent piece and schedule the next. End the link if the receiver refuses it."""
        self._scheduled = False
        piece = self._take()
        if piece is None:
            return
        self._wake()  # Schedules this method for the next piece.
        refusal = deliver(self._receiver, self.peer, self.lane, self._reader.take(piece))
        if refusal is not None:
            self._finish(str(refusal))
            self._receiver.refused(self.peer, refusal.code, str(refusal))


def deliver(receiver: Receiver, peer: PeerId, lane: Lane, messages: Iterable[Received]) -> WireError | None:
    """Pass each message to the receiver as soon as it is parsed. Returns the WireError of parsing or of the
    receiver, for which the caller must close the link; None if there was none."""
    try:
        for message, body, wire_bytes in messages:
            receiver.received(peer, lane, message, body, wire_bytes)
    except WireError as error:
        return error
    return None
