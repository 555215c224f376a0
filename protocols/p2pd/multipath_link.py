"""Links on p2pd: one libp2p stream, and on a slow line more of them on connections of their own.

What loss leaves one TCP connection may be a fraction of the line (carriers.py). So a link may have *subflows*
besides its first stream, as in Multipath TCP (RFC 8684): each is a stream on another connection to the same
peer. A message goes whole to the subflow on which the fewest bytes are on their way, so a connection that
waits for a repeated packet holds up only what it has already. The receiver acknowledges messages on the data
lane: so the sender knows what is on its way where, that a line is slow, and what to send again when a subflow
breaks. A message may then arrive twice, and messages of one priority in another order than they were posted;
the data lane's are matched by what they name (docs/wire.md).

    acknowledgement   messages received so far on this stream u32 (modulo 2**32), in the order of their ends
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from protocols.errors import Backlog, Malformed, WireError
from protocols.fields import Body
from protocols.framing.frames import CLOSING, KEEPALIVE, PIECE_BYTES, FrameWriter, Outgoing, priority_of
from protocols.framing.send_queue import BoundedLink
from protocols.framing.upload_turns import Upload
from protocols.messages.table import Lane, Message
from swarmnet.identifiers import PeerId

KEEPALIVE_SECONDS = 20.0
PARTING_SECONDS = 1.0
"""For the other side to end a stream after us."""
WRITE_SECONDS = 30.0
"""Longest wait for room to write: the other side reads nothing, though it is connected."""
SLOW_SECONDS = 0.3
"""A link whose long messages are acknowledged later than this, on average, is slow: at 10 Mbit/s and 50 ms a
microbatch of the smallest model takes 0.11 s, on a connection of 2.7 Mbit/s 0.26 s and what is before it."""
EPOCH_MESSAGES, EPOCH_SECONDS = 8, 3.0
"""An average is over so many messages and so long, at least."""
SLOW_EPOCHS = 2
"""After so many slow ones in a row the link asks for another subflow. A peer that was frozen acknowledges
late what was on its way, once."""
LONG_BYTES = 16 * 1024
"""Shorter messages say nothing about a line's speed."""
STALLED_SECONDS = 8.0
"""A subflow that has acknowledged nothing for so long is cut, and its messages go another way. TCP repeats a
packet after 0.2, 0.6, 1.4, 3 and 6.2 s; a microbatch's own deadline is at least as long as that."""
ACKNOWLEDGED: frozenset[Lane] = frozenset({"data"})
"""Lanes on which the receiver acknowledges. On the others the order of messages matters."""
_ACKNOWLEDGEMENT = struct.Struct(">I")
_READ_BYTES = 4096

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def acknowledgement(messages: int) -> bytes:
    """What a receiver writes after so many messages."""
    return _ACKNOWLEDGEMENT.pack(messages & 0xFFFFFFFF)


class Owner(Protocol):
    """The link of a subflow."""

    def taken(self) -> None:
        """A piece was carried away."""

    def acknowledged(self, outgoing: Outgoing, seconds: float) -> None:
        """A message has arrived, so long after it was posted."""

    def broke(self, subflow: Subflow, reason: str, error: WireError | None) -> None:
        """The stream has ended; the error if the other side is to be refused for it."""


class Subflow:
    """One stream that we opened: the frames that wait for it, and what is on its way."""

    def __init__(
        self,
        name: str,
        stream: Stream,
        acknowledged: bool,
        owner: Owner,
        upload: Upload | None,
        carrier: PeerId | None = None,
    ) -> None:
        """`carrier`: over whose connection; None: libp2p's own to that peer."""
        self.carrier = carrier
        self._upload = upload
        self._held = b""
        """A piece that waits for its turn."""
        self._reader, self._stream = stream
        self._stream.transport.set_write_buffer_limits(high=2 * PIECE_BYTES)
        self._acknowledged, self._owner = acknowledged, owner
        self._clock = asyncio.get_running_loop().time
        self.writer = FrameWriter()
        self.on_its_way = 0
        """Bytes that were posted and are not acknowledged; 0 on a lane without acknowledgements."""
        self.last_sign = self._clock()
        """When something was last acknowledged, or posted while nothing was on its way."""
        self._posted: dict[Outgoing, float] = {}
        """Not acknowledged, and when it was posted."""
        self._ended: deque[Outgoing] = deque()
        """Of these, what was written whole: acknowledged in this order."""
        self._count = 0
        self._half = b""
        self._parting: asyncio.TimerHandle | None = None
        """Since this side has ended it."""
        self._work = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._send(), name=f"send {name}"),
            asyncio.create_task(self._watch(), name=f"watch {name}"),
        ]

    def post(self, message: Message, body: Body) -> int:
        """Queue a message; its bytes on the wire."""
        outgoing = self.writer.add(message, body)
        if self._acknowledged:
            if not self._posted:
                self.last_sign = self._clock()
            self._posted[outgoing] = self._clock()
            self.on_its_way += outgoing.whole
        self._work.set()
        return self.writer.wire_bytes(outgoing)

    def load(self) -> int:
        """Bytes before a message that would be posted now."""
        return self.on_its_way if self._acknowledged else self.writer.queued_bytes

    def stalled(self) -> bool:
        return bool(self._posted) and self._clock() > self.last_sign + STALLED_SECONDS

    def undelivered(self) -> list[Outgoing]:
        """What may not have arrived, in the order of posting."""
        return list(self._posted)

    async def _send(self) -> None:
        try:
            while True:
                piece = self._take()
                if piece is None:
                    self._work.clear()
                    piece = await self._next()
                if self._upload is not None:
                    self._held = piece
                    await self._upload.turn(len(piece), priority_of(piece))
                    self._held = b""
                self._stream.write(piece)
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._stream.drain()
        except TimeoutError:
            self._owner.broke(self, f"it takes nothing since {WRITE_SECONDS:g} s", None)
        except (OSError, RuntimeError) as error:
            self._owner.broke(self, f"the stream broke ({error or type(error).__name__})", None)

    def _take(self) -> bytes | None:
        piece = self.writer.next_piece()
        if piece is not None and self._acknowledged and self.writer.ended is not None:
            self._ended.append(self.writer.ended)
        self._owner.taken()
        return piece

    async def _next(self) -> bytes:
        """The next piece once there is one; a keep-alive if that takes too long."""
        try:
            async with asyncio.timeout(KEEPALIVE_SECONDS):
                await self._work.wait()
        except TimeoutError:
            return KEEPALIVE
        return self._take() or KEEPALIVE

    async def _watch(self) -> None:
        try:
            while data := await self._reader.read(_READ_BYTES):
                if self._parting is not None:
                    continue
                if not self._acknowledged:
                    raise Malformed("bytes on a one-way stream")
                self._arrived(data)
            self._other_side_ended("it ended")
        except Malformed as error:
            self._other_side_ended("it answered something else than acknowledgements", error)
        except (OSError, RuntimeError) as error:
            self._other_side_ended(f"the stream broke ({error or type(error).__name__})")

    def _other_side_ended(self, reason: str, error: Malformed | None = None) -> None:
        """The other side has ended it: because we did, or by itself."""
        if self._parting is None:
            self._owner.broke(self, reason, error)
        else:
            self._parting.cancel()
            self._stream.transport.abort()

    def _arrived(self, data: bytes) -> None:
        """Acknowledgements: the newest says all. Raises Malformed."""
        data = self._half + data
        whole = len(data) - len(data) % _ACKNOWLEDGEMENT.size
        self._half = data[whole:]
        if not whole:
            return
        (count,) = _ACKNOWLEDGEMENT.unpack_from(data, whole - _ACKNOWLEDGEMENT.size)
        fresh = (count - self._count) & 0xFFFFFFFF
        if fresh > len(self._ended):
            raise Malformed(f"{fresh} messages acknowledged where {len(self._ended)} are on their way")
        self._count = count
        self.last_sign = self._clock()
        for _ in range(fresh):
            outgoing = self._ended.popleft()
            self.on_its_way -= outgoing.whole
            self._owner.acknowledged(outgoing, self.last_sign - self._posted.pop(outgoing))

    def close(self, polite: bool) -> None:
        """End the stream; with `polite` the other side learns that this is meant, unless a message is cut.

        Then it is the other side that ends it: an acknowledgement that comes to a stream with nobody behind
        it makes p2pd reset the stream, and what was just written is lost (12 of 400 closes)."""
        polite = polite and self.writer.between_messages and not self._stream.is_closing()
        for task in self._tasks[:1] if polite else self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if polite:
            self._stream.write(self._held + CLOSING)
            self._stream.write_eof()
            cut = self._stream.transport.abort
            self._parting = asyncio.get_running_loop().call_later(PARTING_SECONDS, cut)
        else:
            self._stream.transport.abort()
        self.writer.drop()

    @property
    def over(self) -> bool:
        return all(task.done() for task in self._tasks)

    async def gone(self) -> None:
        """Wait until nothing of it is left."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(1.0):
                await self._stream.wait_closed()
        except (OSError, RuntimeError):
            self._stream.transport.abort()


class P2pdLink(BoundedLink):
    """A link over libp2p streams that we opened: the first, which is the link's life, and subflows."""

    def __init__(
        self,
        peer: PeerId,
        lane: Lane,
        stream: Stream,
        ended: Callable[[P2pdLink, str, WireError | None], None],
        slow: Callable[[P2pdLink], None],
        addresses: Sequence[str],
        backlog_bytes: int,
        upload: Upload | None = None,
    ) -> None:
        """`slow(link)` asks for another subflow; `upload` is what all links together may send."""
        super().__init__(peer, lane, backlog_bytes)
        self.addresses = tuple(addresses)
        self._ended, self._slow, self._upload = ended, slow, upload
        self._epoch_began = asyncio.get_running_loop().time()
        self._messages, self._seconds = 0, 0.0
        """Acknowledged long ones of this epoch, and how long they took together."""
        self._slow_epochs = 0
        self.repeated = 0
        """Messages sent again because their subflow broke."""
        self.broke_at = float("-inf")
        """When a subflow broke, or could not be opened."""
        self._broken: list[Subflow] = []
        self._subflows = [Subflow(f"{lane} {peer}", stream, lane in ACKNOWLEDGED, self, upload)]

    @property
    def queued_bytes(self) -> int:
        return sum(subflow.writer.queued_bytes for subflow in self._subflows)

    @property
    def on_its_way(self) -> int:
        """Bytes that were posted and are not acknowledged."""
        return sum(subflow.on_its_way for subflow in self._subflows)

    @property
    def carriers(self) -> list[PeerId]:
        """Over which there are subflows."""
        return [subflow.carrier for subflow in self._subflows if subflow.carrier is not None]

    def add(self, carrier: PeerId, stream: Stream) -> None:
        """One subflow more."""
        name = f"{self.lane} {self.peer} over {carrier}"
        self._subflows.append(Subflow(name, stream, True, self, self._upload, carrier))

    def _queue(self, message: Message, body: Body) -> int:
        if self.on_its_way + len(body) > self._backlog_bytes:  # Kept until it is acknowledged, if ever.
            raise Backlog(f"{self.on_its_way} bytes to {self.peer} are not acknowledged")
        for subflow in self._subflows[1:]:
            if subflow.stalled():
                self.broke(subflow, f"nothing was acknowledged for {STALLED_SECONDS:g} s", None)
        return min(self._subflows, key=Subflow.load).post(message, body)

    def _drop(self) -> None:
        for subflow in self._subflows:
            subflow.writer.drop()

    # -- of the subflows -------------------------------------------------------------------------------

    def taken(self) -> None:
        self._wake_waiters()

    def acknowledged(self, outgoing: Outgoing, seconds: float) -> None:
        if outgoing.whole < LONG_BYTES:
            return
        self._messages += 1
        self._seconds += seconds
        now = asyncio.get_running_loop().time()
        if self._messages < EPOCH_MESSAGES or now < self._epoch_began + EPOCH_SECONDS:
            return
        slow = self._seconds / self._messages > SLOW_SECONDS
        self._slow_epochs = self._slow_epochs + 1 if slow else 0
        self._epoch_began, self._messages, self._seconds = now, 0, 0.0
        if self._slow_epochs >= SLOW_EPOCHS:
            self._slow_epochs = 0
            self._slow(self)

    def broke(self, subflow: Subflow, reason: str, error: WireError | None) -> None:
        """The link ends with its first stream; what another one did not deliver goes over those left."""
        if subflow is self._subflows[0] or error is not None:
            self.fail(reason, error)
        elif subflow in self._subflows:
            self._subflows.remove(subflow)
            self._broken = [broken for broken in self._broken if not broken.over] + [subflow]
            self.broke_at = asyncio.get_running_loop().time()
            again = subflow.undelivered()
            subflow.close(polite=False)
            for outgoing in again:
                self.repeated += 1
                min(self._subflows, key=Subflow.load).post(outgoing.message, outgoing.body)

    # -- the end ---------------------------------------------------------------------------------------

    def fail(self, reason: str, error: WireError | None = None) -> None:
        """End the link and say so."""
        self._close(reason, polite=False, told=reason, error=error)

    def close(self) -> None:
        self._close("closed by us", polite=True, told="", error=None)

    def _close(self, reason: str, polite: bool, told: str, error: WireError | None) -> None:
        if self.closed:
            return
        for subflow in self._subflows:
            subflow.close(polite)
        self._finish(reason)
        self._ended(self, told, error)

    async def gone(self) -> None:
        """Wait until nothing of the link is left."""
        await asyncio.gather(*(subflow.gone() for subflow in [*self._subflows, *self._broken]))
