"""What it costs to send activations: messages over real p2pd links, beside plain asyncio TCP in the same run.

Both ends live in this process and on one event loop, for p2pd as for TCP, so the ratios hold where the
figures differ from machine to machine. A p2pd link frames, hashes, encrypts (libp2p) and passes every byte
through two p2pd processes; the TCP baseline does nothing but length, body and kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Protocol

import uvloop

from protocols.daemon.p2pd import LOOPBACK
from protocols.daemon.temporary import prefix
from protocols.messages.table import Act, Busy, Lane, Message
from protocols.p2pd.transport import P2pdTransport
from protocols.ports import Link
from protocols.signed.identity import create
from swarmnet.identifiers import PeerId

SIZES = (64 * 1024, 1024 * 1024, 16 * 1024 * 1024)
"""Bytes of a body: a small activation, a usual one, a long one."""
STREAM_BYTES = 64 * 1024 * 1024
"""So much is sent in a row to measure megabytes per second."""
QUEUED_BYTES = 32 * 1024 * 1024
"""Half of what a link queues at most; the next message is posted when so little is left."""
SMALL_MESSAGES = 200
DEADLINE_SECONDS = 20.0
READ_BYTES = 512 * 1024
"""Read buffer of the TCP baseline, as large as that of p2pd's streams (protocols/daemon/p2pd.py)."""
_LENGTH = struct.Struct(">I")


class Carrier(Protocol):
    """Carries bodies from one end to the other."""

    async def send(self, body: bytes) -> None:
        """Hand one over; returns when there is room for the next."""

    async def received(self, count: int) -> None:
        """Wait until so many have arrived in all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One size of body; medians over the repeats."""

    size: int
    megabytes_per_second: float
    baseline_megabytes_per_second: float
    seconds: float
    """From posting one message to its arrival, nothing else under way."""
    baseline_seconds: float

    @property
    def speed_ratio(self) -> float:
        return self.megabytes_per_second / self.baseline_megabytes_per_second

    @property
    def time_ratio(self) -> float:
        return self.seconds / self.baseline_seconds


@dataclass(frozen=True, slots=True)
class Report:
    repeats: int
    small_seconds: float
    """One way, a message without a body."""
    small_baseline_seconds: float
    rows: tuple[Row, ...]


class Arrivals:
    """Counts what has come, and wakes who waits for it. The `Receiver` of the p2pd side."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        self.arrived()

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None: ...

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        raise AssertionError(f"an honest message was refused: {reason}")

    def arrived(self) -> None:
        self.count += 1
        self._changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self.count < count:
                self._changed.clear()
                await self._changed.wait()


class P2pdCarrier:
    def __init__(self, link: Link, arrivals: Arrivals) -> None:
        self.link, self.arrivals = link, arrivals

    async def send(self, body: bytes) -> None:
        if not body:
            self.link.post(Busy(self.link.peer, 0, 1))
            return
        await self.link.drained(QUEUED_BYTES, DEADLINE_SECONDS)
        self.link.post(Act(self.link.peer, 0, 1, 1, DEADLINE_SECONDS, (1, 1, 1)), body)

    async def received(self, count: int) -> None:
        await self.arrivals.until(count)


class TcpCarrier:
    def __init__(self, writer: asyncio.StreamWriter, arrivals: Arrivals) -> None:
        self.writer, self.arrivals = writer, arrivals

    async def send(self, body: bytes) -> None:
        self.writer.writelines((_LENGTH.pack(len(body)), body))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.writer.drain()

    async def received(self, count: int) -> None:
        await self.arrivals.until(count)


def bench(repeats: int = 5) -> Report:
    """Measure all SIZES, `repeats` times each, p2pd and TCP in turn."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_bench(repeats))


async def _bench(repeats: int) -> Report:
    async with _p2pd() as p2pd, _tcp() as tcp:
        counted = {id(p2pd): 0, id(tcp): 0}

        async def carry(carrier: Carrier, body: bytes, count: int) -> float:
            """Seconds from the first hand-over to the last arrival."""
            start = perf_counter()
            for _ in range(count):
                await carrier.send(body)
            counted[id(carrier)] += count
            await carrier.received(counted[id(carrier)])
            return perf_counter() - start

        for carrier in (p2pd, tcp):  # A fresh stream's window starts at 256 KiB and grows with use.
            await carry(carrier, bytes(SIZES[1]), 32)
        small = {
            id(carrier): median([await carry(carrier, b"", 1) for _ in range(SMALL_MESSAGES)])
            for carrier in (p2pd, tcp)
        }
        rows = []
        for size in SIZES:
            body, count = bytes(size), STREAM_BYTES // size
            streams: dict[int, list[float]] = {id(p2pd): [], id(tcp): []}
            ones: dict[int, list[float]] = {id(p2pd): [], id(tcp): []}
            for _ in range(repeats):
                for carrier in (p2pd, tcp):
                    streams[id(carrier)].append(await carry(carrier, body, count))
                    ones[id(carrier)].append(await carry(carrier, body, 1))
            speed, baseline = (size * count / 1e6 / median(times) for times in streams.values())
            rows.append(Row(size, speed, baseline, *(median(times) for times in ones.values())))
        return Report(repeats, small[id(p2pd)], small[id(tcp)], tuple(rows))


@contextlib.asynccontextmanager
async def _p2pd() -> AsyncIterator[Carrier]:
    """A link between two p2pd on 127.0.0.1."""
    with tempfile.TemporaryDirectory(prefix=prefix("bench")) as folder:
        async with contextlib.AsyncExitStack() as stack:
            ends = []
            for name in ("sender.key", "receiver.key"):
                create(Path(folder, name))
                ends.append(await P2pdTransport.start(Path(folder, name), LOOPBACK))
                stack.push_async_callback(ends[-1].close)
            arrivals = Arrivals()
            for end in ends:
                end.listen(arrivals)
            link = await ends[0].open(ends[1].peer, "data", DEADLINE_SECONDS, ends[1].addresses)
            yield P2pdCarrier(link, arrivals)


@contextlib.asynccontextmanager
async def _tcp() -> AsyncIterator[Carrier]:
    """A TCP connection on 127.0.0.1."""
    arrivals = Arrivals()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # The end.
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                await reader.readexactly(length)
                arrivals.arrived()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=READ_BYTES)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        yield TcpCarrier(writer, arrivals)
        writer.close()
        await writer.wait_closed()


def render(report: Report) -> str:
    """A table for people."""
    lines = [
        f"p2pd links on 127.0.0.1 beside plain asyncio TCP, both ends in one process, medians of "
        f"{report.repeats}",
        "",
        f"small message, one way: p2pd {report.small_seconds * 1e6:,.0f} us, "
        f"TCP {report.small_baseline_seconds * 1e6:,.0f} us, "
        f"{report.small_seconds / report.small_baseline_seconds:.1f} times",
        "",
        f"{'body':>8}{'p2pd':>10}{'TCP':>10}{'ratio':>8}{'one: p2pd':>12}{'TCP':>10}{'ratio':>8}",
        f"{'':>8}{'MB/s':>10}{'MB/s':>10}{'':>8}{'ms':>12}{'ms':>10}{'':>8}",
    ]
    for row in report.rows:
        name = f"{row.size >> 20} MiB" if row.size >= 1 << 20 else f"{row.size >> 10} KiB"
        lines.append(
            f"{name:>8}{row.megabytes_per_second:>10,.0f}{row.baseline_megabytes_per_second:>10,.0f}"
            f"{row.speed_ratio:>8.2f}{row.seconds * 1e3:>12.2f}{row.baseline_seconds * 1e3:>10.2f}"
            f"{row.time_ratio:>8.1f}"
        )
    return "\n".join(lines)
