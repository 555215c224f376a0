"""Measure bandwidth: transfer a few megabytes to or from a peer of the swarm, on a separate stream.

The asker is the peer that measures its own bandwidth. The helper is the peer at the other end.

    asker     direction u8 (0: up, to the helper; 1: down) | bytes u32
    helper    status u8 (0: go; 1: busy)
    then      down: the helper sends the bytes
              up: the asker sends the bytes, and the helper answers each `PART_BYTES` with a u32 count

The count is the number of bytes that the helper has received. The asker ends the stream, since an end by the
helper could overtake the helper's last bytes. A new stream begins slowly (a window of 256 KiB that doubles
each round trip), so the rate is that of the second half. Measurements run one at a time, four a minute, two
for one peer: at most 32 MiB a minute. Beyond these limits the answer is busy. The helper's uploads stay
within its upload limit, after training.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from protocols.daemon.hivemind_imports import P2P, StreamInfo
from protocols.daemon.p2pd import DAEMON_ERRORS, Daemon
from protocols.errors import Backlog, PeerGone
from protocols.framing.upload_turns import Upload
from protocols.messages.table import Chunk
from swarmnet.identifiers import PeerId
from swarmnet.run.schema import WIRE_VERSION

SPEED_PROTOCOL = f"/swarmnet/{WIRE_VERSION}/speed"
BYTES = 4 * 1024 * 1024
"""Bytes of one measurement: 3.4 s at 10 Mbit/s."""
BYTES_LIMIT = 8 * 1024 * 1024
PART_BYTES = 64 * 1024
TURN_BYTES = 16 * 1024
"""Bytes per turn if the upload is limited: at 1 Mbit/s gradients wait 0.13 s for one."""
MEASURE_SECONDS = 6.0
"""Maximum seconds of a measurement. A slow link is measured by the bytes transferred until then."""
SERVE_SECONDS = 15.0
REQUEST_SECONDS = 3.0
"""Timeout for the request in seconds. An asker sends it at once; others must not block the slot."""
STEP_SECONDS = 10.0
TURN_SECONDS = 2.0
"""Seconds that a new asker waits for the measurement before it to finish."""
WAITING_LIMIT = 8
"""Maximum number of askers that wait for their turn; further streams are closed. A stream takes three
descriptors, and an attacker opens hundreds in a second."""
REFUSED_LIMIT = 8
"""Maximum number of askers with the answer "busy" that have not closed; further streams are closed."""
PER_MINUTE, PER_PEER = 4, 2
UP, DOWN = 0, 1
GO, BUSY = b"\0", b"\1"
_REQUEST, _COUNT = struct.Struct(">BI"), struct.Struct(">I")


Streams = dict[asyncio.Task[None], asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class ReceivedSample:
    """The number of bytes received until this time, in seconds of the event loop's clock."""

    seconds: float
    count: int


def rate(samples: list[ReceivedSample]) -> float:
    """Return the bytes per second of the second half of the transfer; 0 if there are too few samples."""
    if len(samples) < 2:
        return 0.0
    half = samples[-1].count / 2
    # The second half begins at the last sample before the count exceeds the half.
    starts = (sample for sample, following in pairwise(samples) if following.count > half)
    start = next(starts, samples[0])
    seconds = samples[-1].seconds - start.seconds
    return (samples[-1].count - start.count) / seconds if seconds > 0 else 0.0


class SpeedService:
    """The helper's side: serves measurements of other peers, one at a time."""

    def __init__(self) -> None:
        self.upload: Upload | None = None
        """Upload limit shared by all links and by measurements; None if there is no limit."""
        self._served: deque[tuple[float, str]] = deque()
        """Time and peer id of the measurements of the last minute."""
        self._waiting: Streams = {}
        self._open: Streams = {}
        self._refused: Streams = {}
        self._idle = asyncio.Event()
        """Set while no measurement runs."""
        self._idle.set()

    async def serve(self, p2p: P2P) -> None:
        """Register `accept` with p2pd as the handler of measurement streams."""
        await p2p.add_binary_stream_handler(SPEED_PROTOCOL, self.accept)

    async def accept(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one stream until it ends: wait for a turn, then measure or answer busy. If too many askers
        wait, or too many were refused and have not closed, the stream is cut without an answer."""
        task = asyncio.current_task()
        assert task is not None, "hivemind calls a handler in a task of its own"
        try:
            if len(self._waiting) >= WAITING_LIMIT:
                return  # `finally` cuts the stream.
            with _registered(self._waiting, task, writer):
                admitted = await self._admit(str(info.peer_id))
            if admitted:
                with _registered(self._open, task, writer):
                    await self._serve(reader, writer)
            elif len(self._refused) < REFUSED_LIMIT:
                with _registered(self._refused, task, writer):
                    await self._refuse(reader, writer)
        except DAEMON_ERRORS:
            pass  # The asker has finished, or its link is too slow for the time limit.
        finally:
            if not self._open:
                self._idle.set()
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the request of an admitted asker and transfer the bytes. A malformed request gets no answer.
        Raises TimeoutError after `SERVE_SECONDS`."""
        self._idle.clear()
        async with asyncio.timeout(SERVE_SECONDS):
            async with asyncio.timeout(REQUEST_SECONDS):
                direction, count = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
            if direction > DOWN or count > BYTES_LIMIT:
                return
            writer.write(GO)
            if direction == DOWN:
                await self._send_limited(writer, count)
            else:
                await self._receive(reader, writer, count)
            await reader.read(1)  # Wait until the asker ends the stream.

    @staticmethod
    async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a request with busy, and wait until the asker ends the stream."""
        async with asyncio.timeout(STEP_SECONDS):
            await reader.readexactly(_REQUEST.size)
            writer.write(BUSY)
            await reader.read(1)

    async def _admit(self, peer: str) -> bool:
        """Wait up to `TURN_SECONDS` for the running measurement, then return True if the asker `peer` may
        measure now. It may not if a measurement still runs or if a limit per minute is reached."""
        with contextlib.suppress(TimeoutError):  # The asker's own last stream may be ending only now.
            async with asyncio.timeout(TURN_SECONDS):
                await self._idle.wait()
        now = asyncio.get_running_loop().time()
        while self._served and self._served[0][0] < now - 60.0:  # Forget those older than a minute.
            self._served.popleft()
        served_to_peer = sum(other == peer for _, other in self._served)
        if self._open or len(self._served) >= PER_MINUTE or served_to_peer >= PER_PEER:
            return False
        self._served.append((now, peer))
        return True

    async def _send_limited(self, writer: asyncio.StreamWriter, count: int) -> None:
        """Send `count` zero bytes, within this peer's upload limit if there is one."""
        if self.upload is None:
            await _send(writer, count)
            return
        for left in range(count, 0, -TURN_BYTES):
            size = min(left, TURN_BYTES)
            await self.upload.turn(size, Chunk.priority)
            await _send(writer, size)

    @staticmethod
    async def _receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> None:
        """Read `count` bytes, and answer each part with the number of bytes received so far."""
        received = 0
        while received < count:
            received += len(await reader.readexactly(min(PART_BYTES, count - received)))
            writer.write(_COUNT.pack(received))

    async def close(self) -> None:
        """Cut the open streams."""
        streams = self._waiting | self._open | self._refused
        for writer in streams.values():
            writer.transport.abort()
        await asyncio.gather(*streams, return_exceptions=True)


@contextlib.contextmanager
def _registered(streams: Streams, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> Iterator[None]:
    """Register a stream in `streams` while the context is active."""
    streams[task] = writer
    try:
        yield
    finally:
        del streams[task]


async def _send(writer: asyncio.StreamWriter, count: int) -> None:
    """Write `count` zero bytes as fast as the stream takes them."""
    part = bytes(PART_BYTES)
    while count > 0:
        writer.write(part[:count])
        count -= len(part)
        await writer.drain()


async def measure(
    daemon: Daemon, helper: PeerId, direction: Literal["up", "down"], count: int = BYTES
) -> float:
    """Measure the bandwidth to or from a connected helper, and return it in bytes per second. The helper's
    upload limit bounds the result. Raises PeerGone if the stream fails, Backlog if the helper is busy."""
    reader, writer = await daemon.open_stream(helper, SPEED_PROTOCOL, STEP_SECONDS)
    samples: list[ReceivedSample] = []
    try:
        writer.write(_REQUEST.pack(UP if direction == "up" else DOWN, count))
        async with asyncio.timeout(STEP_SECONDS):
            if await reader.readexactly(1) != GO:
                raise Backlog(f"{helper} has measured with others just now; try again in a minute")
        try:
            async with asyncio.timeout(MEASURE_SECONDS):
                if direction == "up":
                    await _measure_upload(reader, writer, count, samples)
                else:
                    await _measure_download(reader, count, samples)
        except TimeoutError:
            pass  # The bytes received so far suffice.
    except DAEMON_ERRORS as error:
        raise PeerGone(f"{helper} ended the measurement: {error or type(error).__name__}") from None
    finally:
        writer.transport.abort()
    return rate(samples)


async def _measure_download(reader: asyncio.StreamReader, count: int, samples: list[ReceivedSample]) -> None:
    """Read `count` bytes from the helper, and append a sample after each read. Raises EOFError."""
    clock = asyncio.get_running_loop().time
    received = 0
    while received < count:
        data = await reader.read(PART_BYTES)
        if not data:
            raise EOFError("it ended")
        received += len(data)
        samples.append(ReceivedSample(clock(), received))


async def _measure_upload(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int, samples: list[ReceivedSample]
) -> None:
    """Send `count` bytes, and append a sample for each number of received bytes that the helper reports.
    Raises ValueError if it does not grow."""
    clock = asyncio.get_running_loop().time

    async def send() -> None:
        await _send(writer, count)

    sending = asyncio.create_task(send(), name="speed up")
    try:
        while not samples or samples[-1].count < count:
            (received,) = _COUNT.unpack(await reader.readexactly(_COUNT.size))
            if samples and received <= samples[-1].count:
                raise ValueError("it counts backwards")
            samples.append(ReceivedSample(clock(), min(received, count)))
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
