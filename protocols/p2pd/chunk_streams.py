"""Download chunks of snapshots and text over separate connections, to use the full bandwidth of lossy links.

A snapshot is the group's weights, divided into chunks. A newcomer, which needs one, starts a few carriers:
extra p2pd processes with connections of their own (carriers.py). A holder is a peer that serves chunks. A
chunk is verified by its hash, so neither side needs to know the other's identity.

    request   digest of the settled weights, or SHA-256 of a file of text, 32 | index u16
    answer    length u32 | the chunk; length 0: not held
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from protocols.daemon.hivemind_imports import StreamInfo
from protocols.daemon.p2pd import DAEMON_ERRORS, Daemon, DaemonOptions
from protocols.errors import PeerGone, Unreachable
from protocols.framing.upload_turns import Upload
from protocols.messages.table import Chunk
from protocols.p2pd.carriers import Carriers
from protocols.ports import Arrived, FindChunk, FindText, Progressed, find_no_text
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import public_ranges
from swarmnet.run.schema import WIRE_VERSION

CHUNKS_PROTOCOL = f"/swarmnet/{WIRE_VERSION}/chunks"
CHUNK_LIMIT = 64 * 1024 * 1024
STREAMS_SERVED, STREAMS_PER_PEER, STREAMS_PER_RANGE = 64, 8, 16
"""Maximum streams: in all, of one key, and of one public /24 or /48.

A newcomer has six carriers (`CARRIERS` in peers/state), each with a key and a stream. Keys are free to
create, networks are not. Each stream holds one chunk at a time."""
REQUEST_SECONDS = 20.0
"""A stream without a request for this many seconds is closed."""
ANSWER_SECONDS = 60.0
"""Timeout for writing or reading one chunk, in seconds. The fetch itself notices earlier stalls."""
DIAL_SECONDS = 8.0
PART_BYTES = 16 * 1024
"""Minimum bytes that count as progress, so that a peer that sends single bytes counts as stalled."""
ASKED_PER_STREAM = 2
"""Requests in flight per stream: the next is sent during a transfer, so no round trip is wasted. Chunks of
one connection come one after the other; two in parallel would both be half done at the end."""
CHUNK_PRIORITY = Chunk.priority
_REQUEST, _LENGTH = struct.Struct(">32sH"), struct.Struct(">I")


Resolve = Callable[[Sequence[str]], Awaitable[Sequence[str]]]
"""Returns the addresses that may be dialled, with names resolved (daemon/names.py)."""


class ChunkService:
    """The holder's side: answers requests on streams that others open."""

    def __init__(self) -> None:
        self.find: FindChunk = lambda digest, index: None
        self.find_text: FindText = find_no_text
        self.upload: Upload | None = None
        self._open: dict[asyncio.StreamWriter, tuple[PeerId, frozenset[str]]] = {}
        """Maps each stream to the requesting peer and its public address ranges."""

    async def accept(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the chunk requests of one stream until it ends or is idle. A stream that exceeds the limits
        of streams is cut at once."""
        peer, ranges = PeerId(info.peer_id.to_base58()), public_ranges((str(info.addr),))
        if not self._may_open(peer, ranges):
            writer.transport.abort()
            return
        self._open[writer] = peer, ranges
        try:
            while True:
                async with asyncio.timeout(REQUEST_SECONDS):
                    digest, index = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
                async with asyncio.timeout(ANSWER_SECONDS):
                    text = self.find(digest, index) or await self.find_text(digest, index)
                    chunk = memoryview(text or b"")
                    writer.write(_LENGTH.pack(len(chunk)))
                    await self._write(writer, chunk)
        except DAEMON_ERRORS:
            pass  # The requester has finished or has gone.
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _may_open(self, peer: PeerId, ranges: frozenset[str]) -> bool:
        """Return True if one more stream of this peer, from these address ranges, is within the limits."""
        of_peer = sum(open_peer == peer for open_peer, _ in self._open.values())
        of_range = sum(bool(open_ranges & ranges) for _, open_ranges in self._open.values())
        if of_peer >= STREAMS_PER_PEER or of_range >= STREAMS_PER_RANGE:
            return False
        return len(self._open) < STREAMS_SERVED

    async def _write(self, writer: asyncio.StreamWriter, chunk: memoryview) -> None:
        """Write a chunk, in parts that wait for their turn if this peer has an upload limit."""
        if self.upload is None:
            writer.write(chunk)
            await writer.drain()
            return
        for start in range(0, len(chunk), PART_BYTES):
            part = chunk[start : start + PART_BYTES]
            await self.upload.turn(len(part), CHUNK_PRIORITY)
            writer.write(part)
            await writer.drain()

    def close(self) -> None:
        for writer in self._open:
            writer.transport.abort()


@dataclass(eq=False, kw_only=True)
class ChunkCarriers:
    """The newcomer's side: fetches chunks from holders, over one stream per holder and carrier."""

    carriers: Carriers
    daemons: Sequence[Daemon]
    arrived: Arrived
    progressed: Progressed
    resolve: Resolve

    def __post_init__(self) -> None:
        self._requests: dict[PeerId, asyncio.Queue[tuple[bytes, int]]] = {}
        """Maps each holder to the requests (digest, index) that are not sent yet."""
        self._fetchers: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        count: int,
        options: DaemonOptions,
        arrived: Arrived,
        progressed: Progressed,
        *,
        resolve: Resolve,
    ) -> ChunkCarriers:
        """Start `count` carriers. `arrived(holder, digest, index, chunk)` is called for each request; the
        chunk is None if it failed. `progressed(holder)` is called for each part. Raises CannotStart."""
        carriers = Carriers(options)
        try:
            return cls(
                carriers=carriers,
                daemons=await carriers.start(count),
                arrived=arrived,
                progressed=progressed,
                resolve=resolve,
            )
        except BaseException:
            await carriers.close()
            raise

    @property
    def requests_per_holder(self) -> int:
        return len(self.daemons) * ASKED_PER_STREAM

    def ask(self, holder: PeerId, addresses: Sequence[str], digest: bytes, index: int) -> None:
        """Request a chunk of the snapshot `digest` from a holder. `arrived` is called exactly once for it.
        The first request to a holder starts one task per carrier, which share the holder's queue."""
        queue = self._requests.get(holder)
        if queue is None:
            queue = asyncio.Queue()
            self._requests[holder] = queue
            for daemon in self.daemons:
                fetching = self._fetch(daemon, holder, tuple(addresses), queue)
                self._fetchers.append(asyncio.create_task(fetching, name=f"carrier {holder}"))
        queue.put_nowait((digest, index))

    async def _fetch(
        self,
        daemon: Daemon,
        holder: PeerId,
        addresses: Sequence[str],
        queue: asyncio.Queue[tuple[bytes, int]],
    ) -> None:
        """Take requests from the queue and fetch their chunks over one stream, at most `ASKED_PER_STREAM` in
        flight. If the stream fails, all its requests fail, and the next request opens a new one."""
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        in_flight: deque[tuple[bytes, int]] = deque()  # The (digest, index) of each request.
        try:
            while True:
                new_requests = []
                if not in_flight:  # Wait for a request. Otherwise, take one only if it is there already.
                    new_requests.append(await queue.get())
                while len(in_flight) + len(new_requests) < ASKED_PER_STREAM and not queue.empty():
                    new_requests.append(queue.get_nowait())
                in_flight += new_requests
                try:
                    if stream is None:
                        await daemon.connect(holder, await self.resolve(addresses), DIAL_SECONDS)
                        stream = await daemon.open_stream(holder, CHUNKS_PROTOCOL, DIAL_SECONDS)
                    reader, writer = stream
                    writer.write(b"".join(_REQUEST.pack(*request) for request in new_requests))
                    async with asyncio.timeout(ANSWER_SECONDS):
                        chunk = await self._read(reader, holder)
                except (PeerGone, Unreachable, *DAEMON_ERRORS):
                    if stream is not None:
                        writer.transport.abort()
                    stream = None
                    while in_flight:
                        self.arrived(holder, *in_flight.popleft(), None)
                else:  # Chunks come in the order of the requests.
                    self.arrived(holder, *in_flight.popleft(), chunk)
        finally:
            if stream is not None:
                writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, holder: PeerId) -> bytes | None:
        """Read the next chunk; None if the holder does not have it. Raises PeerGone if it is too long."""
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > CHUNK_LIMIT:
            raise PeerGone(f"{holder} announces a chunk of {length} bytes")
        parts = []
        while length:
            parts.append(await reader.readexactly(min(PART_BYTES, length)))
            length -= len(parts[-1])
            self.progressed(holder)
        return b"".join(parts) or None

    async def close(self) -> None:
        """Cancel all requests and end the carriers. `arrived` is not called for what was cancelled."""
        for fetcher in self._fetchers:
            fetcher.cancel()
        await asyncio.gather(*self._fetchers, return_exceptions=True)
        await self.carriers.close()
