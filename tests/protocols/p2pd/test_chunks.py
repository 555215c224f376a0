"""Chunks over carriers: real p2pd, several connections to one holder, and what does not fit is refused."""

import asyncio

import pytest
from on_p2pd import DEADLINE, transports

from protocols.p2pd.chunk_streams import ASKED_PER_STREAM, CHUNKS_PROTOCOL, PART_BYTES
from swarmnet.identifiers import PeerId
from swarmnet.snapshots.fetch import Dropped, RequestChunk, SnapshotFetch

pytestmark = pytest.mark.loopback
DIGEST = b"d" * 32
CHUNKS = [bytes([number]) * (3 * PART_BYTES + number) for number in range(6)]


@pytest.fixture
async def start(tmp_path):
    async with transports(tmp_path) as start:
        yield start


def holds(digest, index):
    return memoryview(CHUNKS[index]) if digest == DIGEST and index < len(CHUNKS) else None


class Answers:
    def __init__(self):
        self.chunks, self.parts = asyncio.Queue(), []

    def arrived(self, holder, digest, index, chunk):
        self.chunks.put_nowait((index, chunk))

    async def take(self, count):
        async with asyncio.timeout(DEADLINE):
            return dict([await self.chunks.get() for _ in range(count)])


async def test_chunks_come_over_connections_of_their_own_and_those_not_held_are_told(start):
    holder, newcomer = await start(), await start()
    holder.serve_chunks(holds)
    answers = Answers()
    carriers = await newcomer.carriers(2, answers.arrived, answers.parts.append)
    try:
        assert carriers.requests_per_holder == 2 * ASKED_PER_STREAM
        for index in range(len(CHUNKS) + 1):
            carriers.ask(holder.peer, holder.addresses, DIGEST, index)
        carriers.ask(holder.peer, holder.addresses, b"x" * 32, 7)
        found = await answers.take(len(CHUNKS) + 2)
    finally:
        await carriers.close()
    assert found == {**dict(enumerate(CHUNKS)), 6: None, 7: None}
    assert answers.parts.count(holder.peer) >= 3 * len(CHUNKS)


async def test_what_was_being_sent_ends_when_the_holder_holds_something_else(start):
    holder, newcomer = await start(), await start()
    holder.serve_chunks(holds)
    await newcomer.daemon.connect(holder.peer, holder.addresses, DEADLINE)
    reader, writer = await newcomer.daemon.open_stream(holder.peer, CHUNKS_PROTOCOL, DEADLINE)
    writer.write(DIGEST + bytes(2))
    async with asyncio.timeout(DEADLINE):
        await reader.readexactly(4 + len(CHUNKS[0]))
        holder.serve_chunks(lambda digest, index: None)
        assert await reader.read() == b""
    writer.transport.abort()


async def test_a_holder_that_is_not_there_is_told_for_every_chunk(start):
    holder, newcomer = await start(), await start()
    addresses = holder.addresses
    await holder.close()
    answers = Answers()
    carriers = await newcomer.carriers(1, answers.arrived, answers.parts.append)
    try:
        for index in range(3):
            carriers.ask(holder.peer, addresses, DIGEST, index)
        assert await answers.take(3) == {0: None, 1: None, 2: None}
    finally:
        await carriers.close()


async def test_the_service_goes_on_after_garbage_and_half_requests(start):
    holder, stranger = await start(), await start()
    holder.serve_chunks(holds)
    await stranger.daemon.connect(holder.peer, holder.addresses, DEADLINE)
    for data in (b"", b"short", b"\xff" * 1000):
        _, writer = await stranger.daemon.open_stream(holder.peer, CHUNKS_PROTOCOL, DEADLINE)
        writer.write(data)
        writer.transport.abort()
    reader, writer = await stranger.daemon.open_stream(holder.peer, CHUNKS_PROTOCOL, DEADLINE)
    writer.write(DIGEST + (1).to_bytes(2, "big"))
    async with asyncio.timeout(DEADLINE):
        length = int.from_bytes(await reader.readexactly(4), "big")
        assert await reader.readexactly(length) == CHUNKS[1]
    writer.transport.abort()


def test_a_holder_whose_parts_keep_coming_is_not_dropped_and_a_stalling_one_is():
    slow, stalls = PeerId("slow"), PeerId("stalls")
    fetch = SnapshotFetch(hashes=[b"1", b"2", b"3", b"4"], holders=[slow, stalls], asked_at_once=2)
    assert len([effect for effect in fetch.start(0.0) if isinstance(effect, RequestChunk)]) == 4
    for now in (1.0, 2.0, 3.0):
        fetch.progressed(slow, now)
    effects = fetch.tick(3.0)
    assert [effect.peer for effect in effects if isinstance(effect, Dropped)] == [stalls]
