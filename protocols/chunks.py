"""Chunks of snapshots over connections of their own: how a state is fetched through lossy lines.

Between two peers libp2p keeps one TCP connection, however many streams it carries; at 50 ms and 1 % loss that
is 2.7 Mbit/s with cubic, with one stream as with four (measured). So a newcomer starts a few *carriers*:
p2pd processes with throw-away identities, each with its own connections, which do nothing but fetch chunks.
A chunk is checked by its hash, so it does not matter who asks and who answers.

    request   digest of the settled weights 32 | index u16
    answer    length u32 | the chunk; length 0: not held
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import struct
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from protocols.daemon import DAEMON_ERRORS, Daemon, DaemonOptions
from protocols.errors import PeerGone, Unreachable
from protocols.hivemind_parts import StreamInfo
from protocols.identity import create
from protocols.transport import Arrived, FindChunk, Progressed
from swarmnet.identifiers import PeerId
from swarmnet.manifest import WIRE_VERSION

CHUNKS_PROTOCOL = f"/swarmnet/{WIRE_VERSION}/chunks"
CHUNK_LIMIT = 64 * 1024 * 1024
STREAMS_SERVED = 32
"""Four newcomers at once. Each stream holds one chunk at a time."""
REQUEST_SECONDS = 20.0
"""A stream on which nothing is asked for so long is closed."""
ANSWER_SECONDS = 60.0
"""Longest wait for one chunk to be written or read; who stalls earlier is the fetch's business."""
DIAL_SECONDS = 8.0
PART_BYTES = 16 * 1024
"""So much must come to count as progress: whoever drips bytes stalls."""
ASKED_PER_STREAM = 2
"""While one chunk is on its way the next is asked for: the stream never waits for a round trip. Chunks of one
connection come one after the other; two at once would both be half done when everything else is."""
_REQUEST, _LENGTH = struct.Struct(">32sH"), struct.Struct(">I")


class ChunkService:
    """The holder's side: answers on streams that others open."""

    def __init__(self) -> None:
        self.find: FindChunk = lambda digest, index: None
        self._open: set[asyncio.StreamWriter] = set()

    async def accept(
        self, _info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one stream to its end."""
        if len(self._open) >= STREAMS_SERVED:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            while True:
                async with asyncio.timeout(REQUEST_SECONDS):
                    digest, index = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
                chunk = self.find(digest, index) or memoryview(b"")
                writer.write(_LENGTH.pack(len(chunk)))
                writer.write(chunk)
                async with asyncio.timeout(ANSWER_SECONDS):
                    await writer.drain()
        except DAEMON_ERRORS:
            pass  # It has what it wanted, or has gone.
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    def close(self) -> None:
        for writer in self._open:
            writer.transport.abort()


class Carriers:
    """The newcomer's side: asks on as many connections per holder as there are carriers."""

    def __init__(
        self, daemons: Sequence[Daemon], folder: Path, arrived: Arrived, progressed: Progressed
    ) -> None:
        self._daemons, self._folder, self._arrived, self._progressed = daemons, folder, arrived, progressed
        self._asked: dict[PeerId, asyncio.Queue[tuple[bytes, int]]] = {}
        self._lanes: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, count: int, options: DaemonOptions, arrived: Arrived, progressed: Progressed
    ) -> Carriers:
        """Start `count` p2pd. Raises CannotStart."""
        folder = Path(tempfile.mkdtemp(prefix="swarmnet-carriers-"))
        paths = [folder / f"identity-{number}" for number in range(count)]
        for path in paths:
            create(path)
        starts = [Daemon.start(path, options) for path in paths]
        started = await asyncio.gather(*starts, return_exceptions=True)
        daemons = [daemon for daemon in started if isinstance(daemon, Daemon)]
        carriers = cls(daemons, folder, arrived, progressed)
        if not daemons:
            await carriers.close()
            raise next(error for error in started if isinstance(error, BaseException))
        return carriers

    @property
    def lanes_per_holder(self) -> int:
        """How many chunks are asked of one holder at once."""
        return len(self._daemons) * ASKED_PER_STREAM

    def ask(self, holder: PeerId, addresses: Sequence[str], digest: bytes, index: int) -> None:
        """`arrived` will be called once."""
        queue = self._asked.get(holder)
        if queue is None:
            queue = self._asked[holder] = asyncio.Queue()
            for daemon in self._daemons:
                lane = self._fetch(daemon, holder, tuple(addresses), queue)
                self._lanes.append(asyncio.create_task(lane, name=f"carrier {holder}"))
        queue.put_nowait((digest, index))

    async def _fetch(
        self, daemon: Daemon, holder: PeerId, addresses: Sequence[str],
        queue: asyncio.Queue[tuple[bytes, int]],
    ) -> None:  # fmt: skip
        """One stream to one holder, opened again for the next chunks when it broke."""
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        asked: deque[tuple[bytes, int]] = deque()
        try:
            while True:
                fresh = [] if asked else [await queue.get()]
                while len(asked) + len(fresh) < ASKED_PER_STREAM and not queue.empty():
                    fresh.append(queue.get_nowait())
                asked += fresh
                try:
                    if stream is None:
                        await daemon.connect(holder, addresses, DIAL_SECONDS)
                        stream = await daemon.open_stream(holder, CHUNKS_PROTOCOL, DIAL_SECONDS)
                    stream[1].write(b"".join(_REQUEST.pack(*request) for request in fresh))
                    async with asyncio.timeout(ANSWER_SECONDS):
                        chunk = await self._read(stream[0], holder)
                except (PeerGone, Unreachable, *DAEMON_ERRORS):
                    if stream is not None:
                        stream[1].transport.abort()
                    stream = None
                    while asked:
                        self._arrived(holder, *asked.popleft(), None)
                else:
                    self._arrived(holder, *asked.popleft(), chunk)
        finally:
            if stream is not None:
                stream[1].transport.abort()

    async def _read(self, reader: asyncio.StreamReader, holder: PeerId) -> bytes | None:
        """The next chunk; None if the holder does not have it."""
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > CHUNK_LIMIT:
            raise PeerGone(f"{holder} announces a chunk of {length} bytes")
        parts = []
        while length:
            parts.append(await reader.readexactly(min(PART_BYTES, length)))
            length -= len(parts[-1])
            self._progressed(holder)
        return b"".join(parts) or None

    async def close(self) -> None:
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        await asyncio.gather(*(daemon.stop() for daemon in self._daemons))
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)
