"""Framing without I/O: split messages into pieces of a byte stream, and rebuild messages from pieces.

A message is a header (MessagePack, checked before it is decoded) and a body of bytes. It travels as one or
more *pieces*. Between two pieces a more urgent message (smaller `Message.priority`) may begin. A byte stream
therefore acts as one stream per priority, with one message in progress on each. The layout is:

    piece    flags u8 | length u24 | content
    flags    low 4 bits: priority; 0x80 BEGIN, 0x40 END, 0x20 CLOSE, 0x10 KEEP (the last two: nothing else)
    BEGIN    content starts with: header length u16 | body length u32 | header
    END      content ends with: first 8 bytes of SHA-256 over header and body

The interface is that of h2 and aioquic: bytes in, messages out. Nothing here reads, writes or waits.
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
"""Content size of the pieces that we write, in bytes. At 10 Mbit/s, a home uplink, one takes 52 ms, which is
the longest wait of an urgent message. Throughput is the same from 64 KiB to 4 MiB (427-437 MB/s)."""
PIECE_LIMIT = 256 * 1024
"""Size in bytes of the longest piece that is accepted."""
CHECK_BYTES = 8
"""Size of the checksum. Noise or TLS authenticates all bytes; this detects bugs and cut streams."""
PRIORITIES = 4
"""Messages have priority 0..3."""

_VIEW_BYTES = 4096
"""Minimum size in bytes from which a view into the received data is cheaper than a copy."""
_BEGIN, _END, _CLOSE, _KEEP, _PRIORITY = 0x80, 0x40, 0x20, 0x10, 0x0F
_PIECE = struct.Struct(">BBH")  # flags, the length's top byte, its lower two
_FIRST = struct.Struct(">HI")
CLOSING = _PIECE.pack(_CLOSE, 0, 0)
"""The piece that marks an intended end of the stream."""
KEEPALIVE = _PIECE.pack(_KEEP, 0, 0)
"""The piece that shows that the writer is still alive."""

Received = tuple[Message, bytes, int]
"""A message, its body, and the number of bytes that both took on the wire."""


def wire_bytes(header_bytes: int, body_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the size of a message on the wire in bytes, framing included."""
    content = _FIRST.size + header_bytes + body_bytes + CHECK_BYTES
    return content + _PIECE.size * -(-content // piece_bytes)


def priority_of(piece: bytes) -> int:
    """Return the priority of the message that a piece belongs to."""
    return piece[0] & _PRIORITY


def body_limit(message: Message) -> int:
    """Return the default limit of a message's body: 0 if it may have none."""
    return BODY_LIMIT if type(message).body else 0


class Outgoing:
    """A message that is being sent: `head` (lengths and header, empty once it is sent), body, checksum.
    `remaining` counts its unsent bytes and `whole` all its bytes, without the frames of pieces."""

    __slots__ = ("body", "body_offset", "check", "head", "message", "remaining", "whole")

    def __init__(self, message: Message, header: bytes, body: memoryview) -> None:
        self.message = message
        self.head = _FIRST.pack(len(header), len(body)) + header
        self.check = hashlib.sha256(header)
        self.body = body
        self.body_offset = 0
        self.remaining = len(self.head) + len(body) + CHECK_BYTES
        self.whole = self.remaining

    def content(self, max_bytes: int) -> list[Body]:
        """Return the next bytes to send as a list of parts, at most `max_bytes` in total. The checksum is
        never split. It is updated piece by piece, so that no long body blocks the event loop."""
        is_last = self.remaining <= max_bytes
        count = min(max_bytes, self.remaining - CHECK_BYTES)  # Bytes of head and body.
        self.remaining -= count
        part = self.body[self.body_offset : self.body_offset + count - len(self.head)]
        self.check.update(part)
        self.body_offset += len(part)
        parts: list[Body] = [self.head, part]
        self.head = b""
        if is_last:
            parts.append(self.check.digest()[:CHECK_BYTES])
            self.remaining = 0
        return parts


class FrameWriter:
    """Turns messages into pieces: most urgent first, and in order of posting within one priority."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        """Create a writer of pieces with at most `piece_bytes` bytes of content."""
        self._piece_bytes = min(piece_bytes, PIECE_LIMIT)
        self._header_limit = min(HEADER_LIMIT, piece_bytes - _FIRST.size)  # it fits into its first piece
        self._queues: tuple[deque[Outgoing], ...] = tuple(deque() for _ in range(PRIORITIES))
        self.queued_bytes = 0
        """Bytes of content that `next_piece` has not returned yet."""
        self.ended: Outgoing | None = None
        """The message that ended in the last piece, or None. Readers complete messages in this order."""

    def post(self, message: Message, body: Body = b"") -> int:
        """Queue a message and return its size on the wire in bytes. Raises TooLarge if no receiver would
        accept it. The body must not change until it is sent."""
        return self.wire_bytes(self.add(message, body))

    def wire_bytes(self, outgoing: Outgoing) -> int:
        """Return the size on the wire of a message that was added, in bytes."""
        return outgoing.whole + _PIECE.size * -(-outgoing.whole // self._piece_bytes)

    def add(self, message: Message, body: Body = b"") -> Outgoing:
        """Queue a message, and return it so that the caller can track its progress. The body must not change
        until it is sent. Raises TooLarge if no receiver would accept it."""
        header = encode(message)
        view = memoryview(body).cast("B") if len(body) else memoryview(b"")
        if len(header) > self._header_limit:
            raise TooLarge(f"a {type(message).__name__} header of {len(header)} bytes; cut it up")
        if (len(view) and not type(message).body) or len(view) > BODY_LIMIT:
            raise TooLarge(f"a body of {len(view)} bytes does not fit a {type(message).__name__}")
        outgoing = Outgoing(message, header, view)
        self._queues[message.priority].append(outgoing)
        self.queued_bytes += outgoing.remaining
        return outgoing

    def next_piece(self) -> bytes | None:
        """Return the next piece, or None if nothing is queued. Sets `ended` if it completes a message."""
        for priority, queue in enumerate(self._queues):
            if queue:
                outgoing = queue[0]
                flags = priority | (_BEGIN if outgoing.head else 0)
                remaining_before = outgoing.remaining
                parts = outgoing.content(self._piece_bytes)
                length = remaining_before - outgoing.remaining
                self.queued_bytes -= length
                self.ended = None
                if outgoing.remaining == 0:
                    flags |= _END
                    self.ended = queue.popleft()
                return b"".join((_PIECE.pack(flags, length >> 16, length & 0xFFFF), *parts))
        return None

    @property
    def between_messages(self) -> bool:
        """Return True if no message is partly sent."""
        return not any(queue and not queue[0].head for queue in self._queues)

    def drop(self) -> None:
        """Drop everything that is queued."""
        for queue in self._queues:
            queue.clear()
        self.queued_bytes = 0


class _Incoming:
    """A message that is being received. `remaining` counts the body bytes that have not come yet."""

    __slots__ = ("body_bytes", "check", "message", "parts", "remaining", "wire_bytes")

    def __init__(self, message: Message, header: bytes, body_bytes: int) -> None:
        self.message = message
        self.check = hashlib.sha256(header)
        self.body_bytes = body_bytes
        self.remaining = body_bytes
        self.parts: list[memoryview | bytearray] = []
        self.wire_bytes = _FIRST.size + len(header) + body_bytes + CHECK_BYTES

    def take(self, part: memoryview, read_bytes: int) -> None:
        """Add a part of the body that came in a read of `read_bytes` bytes. A view of a part keeps the whole
        read in memory. A part of at least half of the read is therefore kept as a view, and a smaller one is
        copied. Copies are joined, so that they are not many small objects."""
        self.check.update(part)
        self.remaining -= len(part)
        last = self.parts[-1] if self.parts else None
        if 2 * len(part) >= read_bytes and len(part) >= _VIEW_BYTES:
            self.parts.append(part)
        elif isinstance(last, bytearray) and len(last) < PIECE_LIMIT:
            last += part
        else:
            self.parts.append(bytearray(part))


class FrameReader:
    """Turns bytes into messages. It allocates nothing for a body before the bytes arrive. A generator
    (`_parse`) yields how many bytes it needs next, and gets them from the other methods as they come: n for
    exactly n bytes, -n for any number from 1 to n."""

    def __init__(self, limit: Callable[[Message], int] = body_limit) -> None:
        """Create a reader. `limit` returns the largest body in bytes that a message may have."""
        self._limit = limit
        self._partial: dict[int, _Incoming] = {}
        """The incomplete message of each priority."""
        self._completed: deque[Received] = deque()
        self._parser = self._parse()
        self._needed = next(self._parser)
        """What the parser needs next: exactly n bytes for n, up to n body bytes for -n."""
        self._collected = b""
        """Bytes of the next n that have come already."""
        self._read_bytes = 0
        self._broken = False
        self.messages = 0
        """Number of messages completed so far."""
        self.body_bytes = 0
        """Number of body bytes received so far."""
        self._unfinished_bytes = 0
        """Number of body bytes kept of incomplete messages."""
        self.closed = False
        """True if the writer ended the stream on purpose."""

    @property
    def finished(self) -> bool:
        """Return True if the stream may end here: every message that began is complete."""
        return not self._partial and not self._collected and self._needed == _PIECE.size

    @property
    def held_bytes(self) -> int:
        """Number of bytes kept of incomplete messages."""
        return self._unfinished_bytes + len(self._collected)

    def feed(self, data: bytes) -> list[Received]:
        """Return the messages that `data` completes. Raises Malformed or TooLarge, now and later."""
        return list(self.take(data))

    def take(self, data: bytes) -> Iterator[Received]:
        """Yield the messages that `data` completes; each is parsed on demand. The caller must consume all of
        them before the next call. Raises Malformed or TooLarge, also on every later call."""
        if self._broken:
            raise Malformed("bytes after a malformed piece")
        view, offset = memoryview(data), 0
        self._read_bytes = len(data)
        while offset < len(view) and not self._broken:
            try:
                offset = self._consume(view, offset)
            except Malformed:
                self.close()
                raise
            while self._completed:
                yield self._completed.popleft()

    def close(self) -> None:
        """Accept no more bytes, and free those of incomplete messages. The parser and this object refer to
        each other. Without this call, the bytes would stay until a full garbage collection."""
        self._broken = True
        self._partial.clear()
        self._collected = b""
        self._unfinished_bytes = 0
        self._parser.close()

    def _consume(self, view: memoryview, offset: int) -> int:
        """Pass the next bytes of `view` from `offset` on to the parser, which needs `_needed` bytes. If
        `view` has fewer, they are collected until the others come. Returns the new offset."""
        if self._needed < 0:  # Up to -self._needed body bytes. They are not copied.
            part = view[offset : offset - self._needed]
            self._needed = self._parser.send(part)
            return offset + len(part)
        if self._collected or len(view) - offset < self._needed:  # Not all needed bytes are in `view`.
            part = view[offset : offset + self._needed - len(self._collected)]
            self._collected += bytes(part)
            if len(self._collected) == self._needed:
                collected = self._collected
                self._collected = b""
                self._needed = self._parser.send(memoryview(collected))
            return offset + len(part)
        message_bytes = self._consume_whole_message(view, offset)
        if message_bytes:
            return offset + message_bytes
        part = view[offset : offset + self._needed]
        offset += self._needed
        self._needed = self._parser.send(part)
        return offset

    def _consume_whole_message(self, view: memoryview, offset: int) -> int:
        """Consume a message that is one piece and lies completely in `view`: a fast path without the parser.
        Returns the number of bytes consumed. Returns 0 for any other piece and for an invalid one; the parser
        then raises the error. Raises Malformed or TooLarge for an invalid header."""
        if self._needed != _PIECE.size or self._partial or self.closed:  # Not between two messages.
            return 0
        if len(view) - offset < _PIECE.size + _FIRST.size:
            return 0
        flags, top, low = _PIECE.unpack_from(view, offset)
        header_bytes, body_bytes = _FIRST.unpack_from(view, offset + _PIECE.size)
        content: int = _FIRST.size + header_bytes + body_bytes + CHECK_BYTES
        is_whole_message = flags & ~_PRIORITY == _BEGIN | _END
        if not is_whole_message or content != top << 16 | low or content > PIECE_LIMIT:
            return 0
        start = offset + _PIECE.size + _FIRST.size
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
        self._completed.append((message, bytes(view[start + header_bytes : end]), content + _PIECE.size))
        return content + _PIECE.size

    def _parse(self) -> Generator[int, memoryview, None]:
        """Parse the stream as a coroutine. Yields how many bytes it needs next (n for exactly n, -n for up to
        n) and is sent them. Adds complete messages to `_completed`. Raises Malformed or TooLarge."""
        while True:
            flags, top, low = _PIECE.unpack((yield _PIECE.size))
            remaining = top << 16 | low
            if self.closed:
                raise Malformed("a piece after the closing one")
            if flags & (_CLOSE | _KEEP):  # Such a piece has no content and no other flag.
                if remaining or flags not in (_CLOSE, _KEEP) or (flags == _CLOSE and self._partial):
                    raise Malformed("a closing or keep-alive piece that says something else too")
                self.closed = flags == _CLOSE
                continue
            priority = flags & _PRIORITY
            if remaining > PIECE_LIMIT:
                raise TooLarge(f"a piece of {remaining} bytes; at most {PIECE_LIMIT} are allowed")
            if flags & _BEGIN:
                remaining = yield from self._read_header(priority, remaining)
            elif priority not in self._partial:
                raise Malformed("a piece that continues no message")
            elif remaining == 0:
                raise Malformed("an empty piece")
            yield from self._read_content(priority, remaining, ends=bool(flags & _END))

    def _read_header(self, priority: int, remaining: int) -> Generator[int, memoryview, int]:
        """Read the lengths and the header at the start of a message's first piece, which has `remaining`
        bytes. Returns how many bytes of the piece follow. Raises Malformed or TooLarge."""
        if priority in self._partial:
            raise Malformed("a message begins inside another of its priority")
        if remaining < _FIRST.size:
            raise Malformed(f"a first piece of {remaining} bytes")
        header_bytes, body_bytes = _FIRST.unpack((yield _FIRST.size))
        remaining -= _FIRST.size + header_bytes
        if remaining < 0:
            raise Malformed("a header that is longer than its piece")
        if header_bytes == 0:
            raise Malformed("an empty header")
        header = bytes((yield header_bytes))
        message = decode(header)
        if message.priority != priority:
            raise Malformed(f"a {type(message).__name__} with priority {priority}")
        limit = self._limit(message)
        if body_bytes > limit:
            raise TooLarge(f"{type(message).__name__} with a body of {body_bytes} bytes; {limit} are allowed")
        self._partial[priority] = _Incoming(message, header, body_bytes)
        return remaining

    def _read_content(self, priority: int, remaining: int, ends: bool) -> Generator[int, memoryview, None]:
        """Read the `remaining` bytes of a piece: body bytes, and the checksum if the message `ends` in this
        piece. The complete message is then added to `_completed`. Raises Malformed."""
        incoming = self._partial[priority]
        incoming.wire_bytes += _PIECE.size
        total = incoming.remaining + CHECK_BYTES
        fits = remaining == total if ends else remaining <= incoming.remaining  # The checksum is never split.
        if not fits:
            raise Malformed(f"a piece of {remaining} bytes where {total} complete the message")
        body_remaining = incoming.remaining if ends else remaining
        while body_remaining:
            part = yield -body_remaining
            incoming.take(part, self._read_bytes)
            body_remaining -= len(part)
            self.body_bytes += len(part)
            self._unfinished_bytes += len(part)
        if ends:
            check = yield CHECK_BYTES
            if check != incoming.check.digest()[:CHECK_BYTES]:
                raise Malformed(f"the check of a {type(incoming.message).__name__} does not fit its bytes")
            del self._partial[priority]
            self._unfinished_bytes -= incoming.body_bytes
            self.messages += 1
            self._completed.append((incoming.message, b"".join(incoming.parts), incoming.wire_bytes))
