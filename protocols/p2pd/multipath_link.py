"""Links on p2pd: one libp2p stream each, and on slow paths more streams over separate connections.

A link carries the messages of one lane (a class of messages, such as data) from this peer to another. Packet
loss can limit one TCP connection to a fraction of the bandwidth. A link may therefore have *subflows* in
addition to its first stream, as in Multipath TCP (RFC 8684). Each is a stream on another connection to the
same peer, opened by a carrier (an extra p2pd process). A message is posted (queued) on the subflow with the
fewest bytes in flight, and written there in pieces. Thus a connection that waits for a retransmission delays
only the messages that it already has.

On the data lane, the receiver acknowledges messages. The sender thus knows what is in flight, whether a path
is slow, and what to send again when a subflow breaks. A message may then arrive twice, and messages of one
priority may arrive out of order. Data messages are matched by what they name (docs/wire.md).

    acknowledgement   messages received so far on this stream u32 (modulo 2**32), in the order of their ends
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

from protocols.errors import Backlog, Malformed, WireError
from protocols.fields import Body
from protocols.framing.frames import CLOSING, KEEPALIVE, PIECE_BYTES, FrameWriter, Outgoing, priority_of
from protocols.framing.send_queue import BoundedLink
from protocols.framing.upload_turns import Upload
from protocols.messages.table import Lane, Message
from swarmnet.identifiers import PeerId

KEEPALIVE_SECONDS = 20.0
DEPARTURE_GRACE_SECONDS = 1.0
"""Seconds that the other side has to end a stream after we ended it."""
WRITE_SECONDS = 30.0
"""Timeout for writing in seconds: the other side is connected but reads nothing."""
SLOW_SECONDS = 0.3
"""A link is slow if its long messages are acknowledged later than this on average, in seconds.

At 10 Mbit/s and 50 ms, a microbatch of the smallest model takes 0.11 s. On a connection of 2.7 Mbit/s it
takes 0.26 s plus the queue before it."""
EPOCH_MESSAGES, EPOCH_SECONDS = 8, 3.0
"""Minimum number of messages and seconds over which the average is taken."""
SLOW_EPOCHS = 2
"""Number of consecutive slow averages after which the link requests another subflow. One is not enough: a
peer that was frozen acknowledges late once."""
LONG_BYTES = 16 * 1024
"""Minimum size in bytes of messages that are timed. Shorter ones say nothing about the bandwidth."""
STALLED_SECONDS = 8.0
"""A subflow without acknowledgements for this many seconds is cut, and its messages take another path. TCP
retransmits a packet after 0.2, 0.6, 1.4, 3 and 6.2 s. A microbatch's deadline is at least as long."""
ACKNOWLEDGED: frozenset[Lane] = frozenset({"data"})
"""Lanes on which the receiver acknowledges. On the others, the order of messages matters."""
_ACKNOWLEDGEMENT = struct.Struct(">I")
_READ_BYTES = 4096

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def acknowledgement(messages: int) -> bytes:
    """Return the acknowledgement that a receiver writes once it has received this many messages."""
    return _ACKNOWLEDGEMENT.pack(messages & 0xFFFFFFFF)


@dataclass(eq=False, kw_only=True)
class Subflow:
    """One stream that we opened, with its queued frames and the messages in flight. Start to send and to read
    acknowledgements. `acknowledged` is True if the receiver acknowledges messages. `carrier` owns the
    connection; None means this peer's own libp2p connection."""

    name: InitVar[str]
    stream: InitVar[Stream]
    acknowledged: bool
    owner: P2pdLink
    upload: Upload | None
    carrier: PeerId | None = None

    def __post_init__(self, name: str, stream: Stream) -> None:
        self._piece_awaiting_turn = b""
        """The piece that waits until the upload limit lets it pass; empty if none waits."""
        self._reader, self._stream = stream
        self._stream.transport.set_write_buffer_limits(high=2 * PIECE_BYTES)
        self._clock = asyncio.get_running_loop().time
        self.writer = FrameWriter()
        self.on_its_way = 0
        """Bytes that were posted but not acknowledged; 0 on a lane without acknowledgements."""
        self.last_progress = self._clock()
        """Time of the last acknowledgement, or of a post while nothing was in flight."""
        self._posted: dict[Outgoing, float] = {}
        """Messages that are not acknowledged, with the time of posting."""
        self._written: deque[Outgoing] = deque()
        """Messages of `_posted` that were written completely; they are acknowledged in this order."""
        self._acknowledged_count = 0
        self._partial_acknowledgement = b""
        """First bytes of an acknowledgement that has not arrived completely."""
        self._closing: asyncio.TimerHandle | None = None
        """Set after this side has ended the stream; it cuts the stream if the other side does not end it."""
        self._work = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._send(), name=f"send {name}"),
            asyncio.create_task(self._watch(), name=f"watch {name}"),
        ]

    def post(self, message: Message, body: Body) -> int:
        """Queue a message, count it as in flight if it will be acknowledged, and return its wire bytes."""
        outgoing = self.writer.add(message, body)
        if self.acknowledged:
            if not self._posted:
                self.last_progress = self._clock()
            self._posted[outgoing] = self._clock()
            self.on_its_way += outgoing.whole
        self._work.set()
        return self.writer.wire_bytes(outgoing)

    def load(self) -> int:
        """Return the bytes queued or in flight, which go before a message posted now."""
        return self.on_its_way if self.acknowledged else self.writer.queued_bytes

    def stalled(self) -> bool:
        """Return True if messages are in flight and none was acknowledged for `STALLED_SECONDS`."""
        return bool(self._posted) and self._clock() > self.last_progress + STALLED_SECONDS

    def undelivered(self) -> list[Outgoing]:
        """Return the messages that may not have arrived, in the order of posting."""
        return list(self._posted)

    async def _send(self) -> None:
        """Write pieces as they are queued, and keep-alives while there are none. A stream that breaks, or
        takes nothing for `WRITE_SECONDS`, is reported to the link."""
        try:
            while True:
                piece = self._take_piece()
                if piece is None:
                    self._work.clear()
                    piece = await self._wait_for_piece()
                if self.upload is not None:
                    self._piece_awaiting_turn = piece  # If the link closes now, `close` writes it.
                    await self.upload.turn(len(piece), priority_of(piece))
                    self._piece_awaiting_turn = b""
                self._stream.write(piece)
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._stream.drain()
        except TimeoutError:
            self.owner.broke(self, f"it takes nothing since {WRITE_SECONDS:g} s", None)
        except (OSError, RuntimeError) as error:
            self.owner.broke(self, f"the stream broke ({error or type(error).__name__})", None)

    def _take_piece(self) -> bytes | None:
        """Take the next piece from the queue, or return None if the queue is empty. If the piece ends a
        message, that message is noted as written."""
        piece = self.writer.next_piece()
        if piece is not None and self.acknowledged and self.writer.ended is not None:
            self._written.append(self.writer.ended)
        self.owner.taken()
        return piece

    async def _wait_for_piece(self) -> bytes:
        """Return the next piece once there is one, or a keep-alive after `KEEPALIVE_SECONDS`."""
        try:
            async with asyncio.timeout(KEEPALIVE_SECONDS):
                await self._work.wait()
        except TimeoutError:
            return KEEPALIVE
        return self._take_piece() or KEEPALIVE

    async def _watch(self) -> None:
        """Read acknowledgements until the stream ends. A lane without acknowledgements must stay silent."""
        try:
            while data := await self._reader.read(_READ_BYTES):
                if self._closing is not None:  # This side has ended the stream, so nothing counts any more.
                    continue
                if not self.acknowledged:
                    raise Malformed("bytes on a one-way stream")
                self._acknowledge(data)
            self._other_side_ended("it ended")
        except Malformed as error:
            self._other_side_ended("it answered something else than acknowledgements", error)
        except (OSError, RuntimeError) as error:
            self._other_side_ended(f"the stream broke ({error or type(error).__name__})")

    def _other_side_ended(self, reason: str, error: Malformed | None = None) -> None:
        """Handle that the other side ended the stream. If this side had ended it before, close it without a
        report; otherwise report it to the link."""
        if self._closing is None:
            self.owner.broke(self, reason, error)
        else:
            self._closing.cancel()
            self._stream.transport.abort()

    def _acknowledge(self, data: bytes) -> None:
        """Report to the link each message that `data` acknowledges. Counts are cumulative, so only the newest
        one is read. Raises Malformed if more messages are acknowledged than were written."""
        data = self._partial_acknowledgement + data
        complete_bytes = len(data) - len(data) % _ACKNOWLEDGEMENT.size
        self._partial_acknowledgement = data[complete_bytes:]
        if not complete_bytes:
            return
        (count,) = _ACKNOWLEDGEMENT.unpack_from(data, complete_bytes - _ACKNOWLEDGEMENT.size)
        new_count = (count - self._acknowledged_count) & 0xFFFFFFFF
        if new_count > len(self._written):
            raise Malformed(f"{new_count} messages acknowledged where {len(self._written)} are on their way")
        self._acknowledged_count = count
        self.last_progress = self._clock()
        for _ in range(new_count):
            outgoing = self._written.popleft()
            self.on_its_way -= outgoing.whole
            self.owner.acknowledged(outgoing, self.last_progress - self._posted.pop(outgoing))

    def close(self, polite: bool) -> None:
        """End the stream. If `polite` and no message is half sent, send a closing frame and leave it to the
        other side to close the stream. Otherwise cut it. If this side closed first, a late acknowledgement
        would make p2pd lose the last data (12 of 400 closes)."""
        polite = polite and self.writer.between_messages and not self._stream.is_closing()
        send_task, watch_task = self._tasks
        # After a polite end, the watching task continues: it waits until the other side closes.
        for task in [send_task] if polite else [send_task, watch_task]:
            if task is not asyncio.current_task():
                task.cancel()
        if polite:
            self._stream.write(self._piece_awaiting_turn + CLOSING)  # A piece may wait for its upload turn.
            self._stream.write_eof()
            cut = self._stream.transport.abort
            self._closing = asyncio.get_running_loop().call_later(DEPARTURE_GRACE_SECONDS, cut)
        else:
            self._stream.transport.abort()
        self.writer.drop()

    @property
    def over(self) -> bool:
        """True once both tasks have ended."""
        return all(task.done() for task in self._tasks)

    async def gone(self) -> None:
        """Wait until both tasks have ended and the stream is closed; after one second more it is cut."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(1.0):
                await self._stream.wait_closed()
        except (OSError, RuntimeError):
            self._stream.transport.abort()


class P2pdLink(BoundedLink):
    """A link over streams that this peer opened: the first, with which the link ends, and more subflows."""

    def __init__(
        self,
        *,
        peer: PeerId,
        lane: Lane,
        stream: Stream,
        ended: Callable[[P2pdLink, str, WireError | None], None],
        slow: Callable[[P2pdLink], None],
        addresses: Sequence[str],
        backlog_bytes: int,
        upload: Upload | None = None,
    ) -> None:
        """Create a link over its first stream. `ended(link, reason, error)` is called once at the end,
        `slow(link)` to request another subflow. `upload` is the upload limit shared by all links."""
        super().__init__(peer, lane, backlog_bytes)
        self.addresses = tuple(addresses)
        self._on_end = ended
        self._request_subflow = slow
        self._upload = upload
        self._epoch_began = asyncio.get_running_loop().time()
        self._messages = 0
        self._seconds = 0.0
        """Number of long messages acknowledged in this epoch, and the sum of their times in seconds."""
        self._slow_epochs = 0
        self.repeated = 0
        """Number of messages sent again because their subflow broke."""
        self.broke_at = float("-inf")
        """Time when a subflow last broke or could not be opened."""
        self._broken: list[Subflow] = []
        self._subflows = [
            Subflow(
                name=f"{lane} {peer}",
                stream=stream,
                acknowledged=lane in ACKNOWLEDGED,
                owner=self,
                upload=upload,
            )
        ]

    @property
    def queued_bytes(self) -> int:
        return sum(subflow.writer.queued_bytes for subflow in self._subflows)

    @property
    def on_its_way(self) -> int:
        """Bytes that were posted but not acknowledged."""
        return sum(subflow.on_its_way for subflow in self._subflows)

    @property
    def carriers(self) -> list[PeerId]:
        """The carriers over which there are subflows."""
        return [subflow.carrier for subflow in self._subflows if subflow.carrier is not None]

    def add(self, carrier: PeerId, stream: Stream) -> None:
        """Add a subflow over the stream that `carrier` opened."""
        name = f"{self.lane} {self.peer} over {carrier}"
        self._subflows.append(
            Subflow(
                name=name, stream=stream, acknowledged=True, owner=self, upload=self._upload, carrier=carrier
            )
        )

    def _queue(self, message: Message, body: Body) -> int:
        """Post the message on the least loaded subflow and return its bytes on the wire. Subflows that have
        stalled are cut first. Raises Backlog if too many bytes wait for acknowledgement."""
        if self.on_its_way + len(body) > self._backlog_bytes:  # Bodies are kept until acknowledged.
            raise Backlog(f"{self.on_its_way} bytes to {self.peer} are not acknowledged")
        for subflow in self._subflows[1:]:  # The first is not cut, since the link would end with it.
            if subflow.stalled():
                self.broke(subflow, f"nothing was acknowledged for {STALLED_SECONDS:g} s", None)
        return min(self._subflows, key=Subflow.load).post(message, body)

    def _drop(self) -> None:
        for subflow in self._subflows:
            subflow.writer.drop()

    # -- called by the subflows ---------------------------------------------------------------------------

    def taken(self) -> None:
        self._wake_waiters()

    def acknowledged(self, outgoing: Outgoing, seconds: float) -> None:
        """Add the time of a long message to the epoch's average, and end the epoch when it is full. After
        `SLOW_EPOCHS` slow averages in a row, request another subflow."""
        if outgoing.whole < LONG_BYTES:
            return
        self._messages += 1
        self._seconds += seconds
        now = asyncio.get_running_loop().time()
        if self._messages < EPOCH_MESSAGES or now < self._epoch_began + EPOCH_SECONDS:
            return
        is_slow = self._seconds / self._messages > SLOW_SECONDS
        self._slow_epochs = self._slow_epochs + 1 if is_slow else 0
        self._epoch_began = now
        self._messages = 0
        self._seconds = 0.0
        if self._slow_epochs >= SLOW_EPOCHS:
            self._slow_epochs = 0
            self._request_subflow(self)

    def broke(self, subflow: Subflow, reason: str, error: WireError | None) -> None:
        """Handle the end of a subflow's stream. If it is the link's first stream, or if `error` is set, the
        whole link fails. Otherwise the subflow is removed, and its undelivered messages are sent over the
        remaining ones. A subflow that was removed before is ignored."""
        if subflow is self._subflows[0] or error is not None:
            self.fail(reason, error)
        elif subflow in self._subflows:
            self._subflows.remove(subflow)
            self._broken = [broken for broken in self._broken if not broken.over] + [subflow]
            self.broke_at = asyncio.get_running_loop().time()
            undelivered = subflow.undelivered()
            subflow.close(polite=False)
            for outgoing in undelivered:
                self.repeated += 1
                min(self._subflows, key=Subflow.load).post(outgoing.message, outgoing.body)

    # -- the end ---------------------------------------------------------------------------------------

    def fail(self, reason: str, error: WireError | None = None) -> None:
        """End the link and notify its owner."""
        self._close(reason, polite=False, reported_reason=reason, error=error)

    def close(self) -> None:
        """End the link as intended: its owner gets an empty reason."""
        self._close("closed by us", polite=True, reported_reason="", error=None)

    def _close(self, reason: str, polite: bool, reported_reason: str, error: WireError | None) -> None:
        """Close all subflows, and report the end to the link's owner with `reported_reason` and `error`.
        Callers that wait on the link fail with `reason`. Does nothing if the link is closed."""
        if self.closed:
            return
        for subflow in self._subflows:
            subflow.close(polite)
        self._finish(reason)
        self._on_end(self, reported_reason, error)

    async def gone(self) -> None:
        """Wait until all streams of the link are closed."""
        await asyncio.gather(*(subflow.gone() for subflow in [*self._subflows, *self._broken]))
