"""The `Transport` on p2pd: long-lived raw libp2p streams as one-way links.

The opener writes and keeps one read pending, which is how it learns at once that the other side is gone; the
acceptor reads. A fresh stream starts with a window of 256 KiB and doubles once per round trip, so links are
kept (4 MB at 100 ms: 108 ms on a warm stream, 629 ms on a new one).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from protocols.chunks import CHUNKS_PROTOCOL, Carriers, ChunkService
from protocols.daemon import DAEMON_ERRORS, LOOPBACK, Daemon, DaemonOptions
from protocols.dial_back_service import DialBackService
from protocols.errors import Backlog, Malformed, PeerGone, Unreachable, WireError
from protocols.frames import CLOSING, KEEPALIVE, PIECE_BYTES, FrameReader, body_limit
from protocols.hivemind_parts import StreamInfo
from protocols.links import BACKLOG_BYTES, LocalLink, QueuedLink, deliver
from protocols.messages import Lane, Message
from protocols.speed import SpeedService
from protocols.transport import Arrived, FindChunk, Progressed, Receiver
from swarmnet.identifiers import PeerId
from swarmnet.manifest import WIRE_VERSION

STREAMS_PER_PEER = 32
STREAMS = 512
"""A stranger opened 1 500 silent streams in 1.9 s and took all descriptors (measured)."""
FIRST_MESSAGE_SECONDS = 10.0
KEEPALIVE_SECONDS = 20.0
IDLE_SECONDS = 60.0
"""Three keep-alives missed: the other process is frozen, or the path is dead and libp2p has not noticed."""
WRITE_SECONDS = 30.0
"""Longest wait for room to write: the other side reads nothing, though it is connected."""
_READ_BYTES = 256 * 1024
LANES: tuple[Lane, ...] = get_args(Lane)


def protocol_name(lane: Lane) -> str:
    """The libp2p protocol id of a lane."""
    return f"/swarmnet/{WIRE_VERSION}/{lane}"


class P2pdLink(QueuedLink):
    """A link over one libp2p stream that we opened."""

    def __init__(
        self,
        peer: PeerId,
        lane: Lane,
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        ended: Callable[[P2pdLink, str, WireError | None], None],
        backlog_bytes: int,
    ) -> None:
        super().__init__(peer, lane, backlog_bytes)
        self._reader, self._stream = stream
        self._stream.transport.set_write_buffer_limits(high=2 * PIECE_BYTES)
        self._ended = ended
        self._posted = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._send(), name=f"send {lane} {peer}"),
            asyncio.create_task(self._watch(), name=f"watch {lane} {peer}"),
        ]

    def _wake(self) -> None:
        self._posted.set()

    async def _send(self) -> None:
        try:
            while True:
                piece = self._take()
                if piece is None:
                    self._posted.clear()
                    piece = await self._next()
                self._stream.write(piece)
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._stream.drain()
        except TimeoutError:
            self.fail(f"it takes nothing since {WRITE_SECONDS:g} s")
        except (OSError, RuntimeError) as error:
            self.fail(f"the stream broke ({error or type(error).__name__})")

    async def _next(self) -> bytes:
        """The next piece once there is one; a keep-alive if that takes too long."""
        try:
            async with asyncio.timeout(KEEPALIVE_SECONDS):
                await self._posted.wait()
        except TimeoutError:
            return KEEPALIVE
        return self._take() or KEEPALIVE

    async def _watch(self) -> None:
        try:
            if await self._reader.read(1):
                self.fail("it answered on a one-way stream", Malformed("bytes on a one-way stream"))
            else:
                self.fail("it ended")
        except (OSError, RuntimeError) as error:
            self.fail(f"the stream broke ({error or type(error).__name__})")

    def fail(self, reason: str, error: WireError | None = None) -> None:
        """End the link and say so."""
        if self._finish(reason):
            self._release()
            self._stream.transport.abort()
            self._ended(self, reason, error)

    def close(self) -> None:
        whole = self._writer.between_messages
        if not self._finish("closed by us"):
            return
        self._release()
        if whole:
            self._stream.write(CLOSING)
            self._stream.close()
        else:
            self._stream.transport.abort()
        self._ended(self, "", None)

    def _release(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def gone(self) -> None:
        """Wait until nothing of the link is left."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(1.0):
                await self._stream.wait_closed()
        except (OSError, RuntimeError):
            self._stream.transport.abort()


class P2pdTransport:
    """`Transport` over p2pd; make it with `start`."""

    def __init__(self, daemon: Daemon, limit: Callable[[Message], int], backlog_bytes: int) -> None:
        self.daemon = daemon
        self.chunks = ChunkService()
        """Serves chunks of snapshots to the carriers of others."""
        self.checks = (DialBackService(daemon.peer), SpeedService())
        """What `swarmnet doctor` asks of the peers of a swarm."""
        self._limit, self._backlog_bytes = limit, backlog_bytes
        self._receiver: Receiver | None = None
        self._links: set[P2pdLink] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._accepted: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._per_peer: Counter[PeerId] = Counter()
        self._closed = False
        self._supervisor = asyncio.create_task(self._supervise(), name="links supervisor")

    @classmethod
    async def start(
        cls,
        identity_path: Path,
        options: DaemonOptions,
        *,
        limit: Callable[[Message], int] = body_limit,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> P2pdTransport:
        """Start p2pd with the identity in the file. Raises CannotStart (daemon.py) or IdentityError.

        `limit`: the longest body a message may have, in bytes; called before a body is read."""
        transport = cls(await Daemon.start(identity_path, options), limit, backlog_bytes)
        try:
            for lane in LANES:
                async with asyncio.timeout(options.start_seconds):
                    await transport.daemon.p2p.add_binary_stream_handler(
                        protocol_name(lane), partial(transport._accept, lane)
                    )
            async with asyncio.timeout(options.start_seconds):
                await transport.daemon.p2p.add_binary_stream_handler(CHUNKS_PROTOCOL, transport.chunks.accept)
                for service in transport.checks:
                    await service.serve(transport.daemon.p2p)
        except BaseException:
            await transport.close()
            raise
        return transport

    @property
    def peer(self) -> PeerId:
        return self.daemon.peer

    @property
    def addresses(self) -> Sequence[str]:
        return self.daemon.addresses

    def listen(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def serve_chunks(self, find: FindChunk) -> None:
        """See `Transport.serve_chunks`."""
        self.chunks.find = find

    async def carriers(self, count: int, arrived: Arrived, progressed: Progressed) -> Carriers | None:
        """See `Transport.carriers`. Each is a p2pd that only dials. Raises CannotStart."""
        return await Carriers.start(count, LOOPBACK, arrived, progressed)

    async def ended(self) -> str:
        """Wait until p2pd has ended, by itself or by `close`; why."""
        return await self.daemon.ended()

    async def open(
        self, peer: PeerId, lane: Lane, deadline_seconds: float, addresses: Sequence[str] = ()
    ) -> QueuedLink:
        """See `Transport.open`. Links to oneself do not leave the process."""
        if self._closed or self.daemon.end_reason is not None:
            raise PeerGone(f"this peer's own p2pd is not running ({self.daemon.end_reason})")
        if peer == self.peer:
            if self._receiver is None:
                raise PeerGone("this peer does not listen yet")
            return LocalLink(peer, lane, self._receiver, self._limit, self._backlog_bytes)
        until = asyncio.get_running_loop().time() + deadline_seconds
        if addresses:
            try:
                await self.daemon.connect(peer, addresses, deadline_seconds)
            except Unreachable as error:
                if asyncio.get_running_loop().time() >= until:
                    raise PeerGone(str(error)) from None
                # else it may have moved: libp2p's own routing may know where
        left = max(0.0, until - asyncio.get_running_loop().time())
        stream = await self.daemon.open_stream(peer, protocol_name(lane), left)
        link = P2pdLink(peer, lane, stream, self._link_ended, self._backlog_bytes)
        self._links.add(link)
        return link

    def _link_ended(self, link: P2pdLink, reason: str, error: WireError | None) -> None:
        self._links.discard(link)
        if not self._closed:
            task = asyncio.create_task(link.gone())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        if self._receiver is None or self._closed or not reason:
            return
        if error is not None:
            self._receiver.refused(link.peer, error.code, str(error))
        else:
            self._receiver.lost(link.peer, link.lane, reason)

    async def _accept(
        self, lane: Lane, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A stream that `info.peer_id` (proved by its handshake) opened to us."""
        peer = PeerId(info.peer_id.to_base58())
        receiver, task = self._receiver, asyncio.current_task()
        if receiver is None or self._closed or task is None:
            writer.transport.abort()
            return
        if self._per_peer[peer] >= STREAMS_PER_PEER or len(self._accepted) >= STREAMS:
            writer.transport.abort()
            receiver.refused(
                peer, Backlog.code, f"{self._per_peer[peer]} links of this peer are open already"
            )
            return
        self._accepted[task] = writer
        self._per_peer[peer] += 1
        try:
            error, reason = await self._read(receiver, peer, lane, reader)
        finally:
            writer.transport.abort()
            del self._accepted[task]
            self._per_peer[peer] -= 1
            if not self._per_peer[peer]:
                del self._per_peer[peer]
        if error is not None:
            receiver.refused(peer, error.code, str(error))
        elif not self._closed:
            receiver.lost(peer, lane, reason)

    async def _read(
        self, receiver: Receiver, peer: PeerId, lane: Lane, reader: asyncio.StreamReader
    ) -> tuple[WireError | None, str]:
        """Read a stream to its end: the error to refuse the peer for, or why the stream ended."""
        frames = FrameReader(self._limit)
        clock = asyncio.get_running_loop().time
        first_until = clock() + FIRST_MESSAGE_SECONDS
        try:
            while True:
                until = first_until if frames.messages == 0 else clock() + IDLE_SECONDS
                async with asyncio.timeout_at(until):
                    data = await reader.read(_READ_BYTES)
                if not data:
                    break
                error = deliver(receiver, peer, lane, frames, data)
                if error is not None:
                    return error, ""
        except TimeoutError:
            if frames.messages == 0:
                return Malformed(f"no message within {FIRST_MESSAGE_SECONDS:g} s of opening a link"), ""
            return None, f"silent for {IDLE_SECONDS:g} s"
        except DAEMON_ERRORS as broken:
            return None, f"the stream broke ({broken or type(broken).__name__})"
        if frames.closed:
            return None, "closed by the other side"
        return None, "it ended" if frames.finished else "it ended in the middle of a message"

    def _drop_accepted(self) -> list[asyncio.Task[Any]]:
        """Cut all streams of others: their tasks read an end. Cancelling them makes asyncio 3.11 complain."""
        for writer in self._accepted.values():
            writer.transport.abort()
        return list(self._accepted)

    async def _supervise(self) -> None:
        reason = await self.daemon.ended()
        for link in list(self._links):
            link.fail(reason)
        self._drop_accepted()

    async def close(self) -> None:
        """End all links and p2pd. May be called again."""
        if self._closed:
            return
        links = list(self._links)
        for link in links:
            link.close()
        self._closed = True
        accepted = self._drop_accepted()
        self.chunks.close()
        for service in self.checks:
            await service.close()
        await asyncio.gather(*(link.gone() for link in links), *self._ending, return_exceptions=True)
        await asyncio.gather(*accepted, return_exceptions=True)
        await self.daemon.stop()
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
