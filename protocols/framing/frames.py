"""Framing without IO: messages become pieces of a byte stream, and pieces become messages again.

A message is a header (MessagePack, guarded) and a body. It travels as one or more pieces; a message of a
smaller `Message.priority` overtakes a larger one between two pieces, so a lane is as many streams as there
are priorities, one message in progress on each. docs/wire.md has the layout:

    piece    flags u8 | length u24 | content
    flags    low 4 bits: priority; 0x80 BEGIN, 0x40 END, 0x20 CLOSE, 0x10 KEEP (the last two: nothing else)
    BEGIN    content starts with: header length u16 | body length u32 | header
    END      content ends with: first 8 bytes of SHA-256 over header and body

The shape is h2's and aioquic's: bytes in, messages out; nothing here reads, writes or waits.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator

from protocols.errors import Malformed, TooLarge
from protocols.fields import Body
from protocols.messages.table import BODY_LIMIT, HEADER_LIMIT, Message, decode, encode

PIECE_BYTES = 64 * 1024
"""A piece's content as we write it. At 10 Mbit/s, a home uplink, one takes 52 ms: what an urgent message
waits at most. Throughput is the same from 64 KiB to 4 MiB (427-437 MB/s)."""
PIECE_LIMIT = 256 * 1024
"""The longest piece that is read."""
CHECK_BYTES = 8
"""Noise or TLS below authenticates every byte; this finds bugs and cut streams, at 2^-64."""
PRIORITIES = 4
"""Messages have priority 0..3."""

_VIEW_BYTES = 4096
"""From so many bytes on a view into what was read is cheaper than a copy."""
_BEGIN, _END, _CLOSE, _KEEP, _PRIORITY = 0x80, 0x40, 0x20, 0x10, 0x0F
_PIECE = struct.Struct(">BBH")  # flags, the length's top byte, its lower two
_FIRST = struct.Struct(">HI")
CLOSING = _PIECE.pack(_CLOSE, 0, 0)
"""Says that the stream ends here and that this is meant."""
KEEPALIVE = _PIECE.pack(_KEEP, 0, 0)
"""Says that the writer still runs."""

Received = tuple[Message, bytes, int]
"""A message, its body, and the bytes both took on the wire."""


def wire_bytes(header_bytes: int, body_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """What a message takes on the wire, framing included."""
    content = _FIRST.size + header_bytes + body_bytes + CHECK_BYTES
    return content + _PIECE.size * -(-content // piece_bytes)


def priority_of(piece: bytes) -> int:
    """The priority of the message that a piece belongs to."""
    return piece[0] & _PRIORITY


def body_limit(message: Message) -> int:
    """The default limit: no body where none belongs."""
    return BODY_LIMIT if message.body else 0


class Outgoing:
    """A message on its way out."""

    __slots__ = ("at", "body", "check", "head", "left", "message", "whole")

    def __init__(self, message: Message, header: bytes, body: memoryview) -> None:
        self.message = message
        self.head = _FIRST.pack(len(header), len(body)) + header
        self.check = hashlib.sha256(header)
        self.body, self.at = body, 0
        self.left = self.whole = len(self.head) + len(body) + CHECK_BYTES

    def content(self, most: int) -> list[Body]:
        """The next `most` bytes; hashed here, piece by piece, so that no long body blocks the loop."""
        last = self.left <= most
        count = self.left - CHECK_BYTES if last else min(most, self.left - CHECK_BYTES)  # never half a check
        self.left -= count
        part = self.body[self.at : self.at + count - len(self.head)]
        self.check.update(part)
        self.at += len(part)
        parts: list[Body] = [self.head, part]
        self.head = b""
        if last:
            parts.append(self.check.digest()[:CHECK_BYTES])
            self.left = 0
        return parts


class FrameWriter:
    """Turns messages into pieces, the most urgent first, in order of posting within one priority."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = min(piece_bytes, PIECE_LIMIT)
        self._header_limit = min(HEADER_LIMIT, piece_bytes - _FIRST.size)  # it fits into its first piece
        self._queues: tuple[deque[Outgoing], ...] = tuple(deque() for _ in range(PRIORITIES))
        self.queued_bytes = 0
        """Content still to be taken by `next_piece`."""
        self.ended: Outgoing | None = None
        """The message that ends in the piece taken last: a reader completes messages in this order."""

    def post(self, message: Message, body: Body = b"") -> int:
        """Queue a message; its bytes on the wire. TooLarge if no receiver would take it. The body must not
        change until it is sent."""
        return self.wire_bytes(self.add(message, body))

    def wire_bytes(self, outgoing: Outgoing) -> int:
        """What a message that was added takes on the wire."""
        return outgoing.whole + _PIECE.size * -(-outgoing.whole // self._piece_bytes)

    def add(self, message: Message, body: Body = b"") -> Outgoing:
        """`post` for who wants to know what became of it."""
        header = encode(message)
        view = memoryview(body).cast("B") if len(body) else memoryview(b"")
        if len(header) > self._header_limit:
            raise TooLarge(f"a {type(message).__name__} header of {len(header)} bytes; cut it up")
        if (len(view) and not message.body) or len(view) > BODY_LIMIT:
            raise TooLarge(f"a body of {len(view)} bytes does not fit a {type(message).__name__}")
        outgoing = Outgoing(message, header, view)
        self._queues[message.priority].append(outgoing)
        self.queued_bytes += outgoing.left
        return outgoing

    def next_piece(self) -> bytes | None:
        """The next piece to send, or None when nothing is queued."""
        for priority, queue in enumerate(self._queues):
            if queue:
                outgoing = queue[0]
                flags = priority | (_BEGIN if outgoing.head else 0)
                before = outgoing.left
                parts = outgoing.content(self._piece_bytes)
                length = before - outgoing.left
                self.queued_bytes -= length
                self.ended = None
                if outgoing.left == 0:
                    flags |= _END
                    self.ended = queue.popleft()
                return b"".join((_PIECE.pack(flags, length >> 16, length & 0xFFFF), *parts))
        return None

    @property
    def between_messages(self) -> bool:
        """Whether no message is half sent."""
        return not any(queue and not queue[0].head for queue in self._queues)

    def drop(self) -> None:
        """Forget everything that is queued."""
        for queue in self._queues:
            queue.clear()
        self.queued_bytes = 0


class _Incoming:
    """A message on its way in."""

    __slots__ = ("body_bytes", "check", "left", "message", "parts", "wire_bytes")

    def __init__(self, message: Message, header: bytes, body_bytes: int) -> None:
        self.message = message
        self.check = hashlib.sha256(header)
        self.body_bytes = body_bytes
        self.left = body_bytes
        self.parts: list[memoryview | bytearray] = []
        self.wire_bytes = _FIRST.size + len(header) + body_bytes + CHECK_BYTES

    def take(self, part: memoryview, read_bytes: int) -> None:
        """Some of the body, from a read of so many bytes. Half of a read or more stays there uncopied. Less
        would keep all of it in memory, and a byte by itself takes fifty: such parts are put together."""
        self.check.update(part)
        self.left -= len(part)
        last = self.parts[-1] if self.parts else None
        if 2 * len(part) >= read_bytes and len(part) >= _VIEW_BYTES:
            self.parts.append(part)
        elif isinstance(last, bytearray) and len(last) < PIECE_LIMIT:
            last += part
        else:
            self.parts.append(bytearray(part))


class FrameReader:
    """Turns bytes into messages. Allocates nothing for a body before its bytes have come."""

    def __init__(self, limit: Callable[[Message], int] = body_limit) -> None:
        self._limit = limit
        self._partial: dict[int, _Incoming] = {}
        self._ready: deque[Received] = deque()
        self._parser = self._parse()
        self._wanted = next(self._parser)
        self._head = b""
        self._read_bytes = 0
        self._broken = False
        self.messages = 0
        """Messages completed so far."""
        self.body_bytes = 0
        """Of bodies that have come so far."""
        self._unfinished = 0
        self.closed = False
        """The writer ended the stream on purpose."""

    @property
    def finished(self) -> bool:
        """Whether the stream may end here: every message that began is complete."""
        return not self._partial and not self._head and self._wanted == _PIECE.size

    @property
    def held_bytes(self) -> int:
        """Kept of messages that are not complete."""
        return self._unfinished + len(self._head)

    def feed(self, data: bytes) -> list[Received]:
        """The messages that `data` completes. Raises Malformed or TooLarge, and always again after that."""
        return list(self.take(data))

    def take(self, data: bytes) -> Iterator[Received]:
        """As `feed`, but each message is parsed when it is asked for. Take all before the next `data`."""
        if self._broken:
            raise Malformed("bytes after a malformed piece")
        view, at = memoryview(data), 0
        self._read_bytes = len(data)
        while at < len(view) and not self._broken:
            try:
                at = self._step(view, at)
            except Malformed:
                self.close()
                raise
            while self._ready:
                yield self._ready.popleft()

    def close(self) -> None:
        """Take nothing more, and keep nothing. The parser and this refer to one another: left to itself, what
        a cut stream held would stay until the garbage collector's last generation comes round."""
        self._broken = True
        self._partial.clear()
        self._head, self._unfinished = b"", 0
        self._parser.close()

    def _step(self, view: memoryview, at: int) -> int:
        """Take some of `view` from `at` on; where that ends."""
        if self._wanted < 0:  # body bytes, as many as there are, up to this many: not copied
            part = view[at : at - self._wanted]
            self._wanted = self._parser.send(part)
            return at + len(part)
        if self._head or len(view) - at < self._wanted:
            taken = view[at : at + self._wanted - len(self._head)]
            self._head += bytes(taken)
            if len(self._head) == self._wanted:
                head, self._head = self._head, b""
                self._wanted = self._parser.send(memoryview(head))
            return at + len(taken)
        if whole := self._whole(view, at):
            return at + whole
        part = view[at : at + self._wanted]
        at += self._wanted
        self._wanted = self._parser.send(part)
        return at

    def _whole(self, view: memoryview, at: int) -> int:
        """Take a message that is all in one piece that is all here, as most are; the bytes it took. 0: the
        piece is another one, or something is wrong with it, which the parser finds and names."""
        if self._wanted != _PIECE.size or self._partial or self.closed:
            return 0
        if len(view) - at < _PIECE.size + _FIRST.size:
            return 0
        flags, top, low = _PIECE.unpack_from(view, at)
        header_bytes, body_bytes = _FIRST.unpack_from(view, at + _PIECE.size)
        content: int = _FIRST.size + header_bytes + body_bytes + CHECK_BYTES
        if flags & ~_PRIORITY != _BEGIN | _END or content != top << 16 | low or content > PIECE_LIMIT:
            return 0
        start = at + _PIECE.size + _FIRST.size
        end = start + header_bytes + body_bytes
        if end + CHECK_BYTES > len(view) or not header_bytes:
            return 0
        if hashlib.sha256(view[start:end]).digest()[:CHECK_BYTES] != view[end : end + CHECK_BYTES]:
            return 0
        header = bytes(view[start : start + header_bytes])
        message = decode(header)
        if message.priority != flags & _PRIORITY or body_bytes > self._limit(message):
            return 0
        self.messages += 1
        self.body_bytes += body_bytes
        self._ready.append((message, bytes(view[start + header_bytes : end]), content + _PIECE.size))
        return content + _PIECE.size

    def _parse(self) -> Generator[int, memoryview, None]:
        """Yields how many bytes it needs next: n exactly, -n up to n."""
        while True:
            flags, top, low = _PIECE.unpack((yield _PIECE.size))
            left = top << 16 | low
            if self.closed:
                raise Malformed("a piece after the closing one")
            if flags & (_CLOSE | _KEEP):
                if left or flags not in (_CLOSE, _KEEP) or (flags == _CLOSE and self._partial):
                    raise Malformed("a closing or keep-alive piece that says something else too")
                self.closed = flags == _CLOSE
                continue
            priority = flags & _PRIORITY
            if left > PIECE_LIMIT:
                raise TooLarge(f"a piece of {left} bytes; at most {PIECE_LIMIT} are allowed")
            if flags & _BEGIN:
                left = yield from self._begin(priority, left)
            elif priority not in self._partial:
                raise Malformed("a piece that continues no message")
            elif left == 0:
                raise Malformed("an empty piece")
            yield from self._content(priority, left, ends=bool(flags & _END))

    def _begin(self, priority: int, left: int) -> Generator[int, memoryview, int]:
        """Read a first piece's head and header; what is left of the piece after them."""
        if priority in self._partial:
            raise Malformed("a message begins inside another of its priority")
        if left < _FIRST.size:
            raise Malformed(f"a first piece of {left} bytes")
        header_bytes, body_bytes = _FIRST.unpack((yield _FIRST.size))
        left -= _FIRST.size + header_bytes
        if left < 0:
            raise Malformed("a header that is longer than its piece")
        if header_bytes == 0:
            raise Malformed("an empty header")
        header = bytes((yield header_bytes))
        message = decode(header)
        if message.priority != priority:
            raise Malformed(f"a {type(message).__name__} with priority {priority}")
        most = self._limit(message)
        if body_bytes > most:
            raise TooLarge(f"{type(message).__name__} with a body of {body_bytes} bytes; {most} are allowed")
        self._partial[priority] = _Incoming(message, header, body_bytes)
        return left

    def _content(self, priority: int, left: int, ends: bool) -> Generator[int, memoryview, None]:
        """Read body bytes, and the check if the message ends in this piece."""
        incoming = self._partial[priority]
        incoming.wire_bytes += _PIECE.size
        total = incoming.left + CHECK_BYTES
        if left != total if ends else left > incoming.left:
            raise Malformed(f"a piece of {left} bytes where {total} complete the message")
        body = incoming.left if ends else left
        while body:
            part = yield -body
            incoming.take(part, self._read_bytes)
            body -= len(part)
            self.body_bytes += len(part)
            self._unfinished += len(part)
        if ends:
            check = yield CHECK_BYTES
            if check != incoming.check.digest()[:CHECK_BYTES]:
                raise Malformed(f"the check of a {type(incoming.message).__name__} does not fit its bytes")
            del self._partial[priority]
            self._unfinished -= incoming.body_bytes
            self.messages += 1
            self._ready.append((incoming.message, b"".join(incoming.parts), incoming.wire_bytes))
