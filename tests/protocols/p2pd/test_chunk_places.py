"""Places for those who fetch chunks: one key, or one network, does not take them all."""

import asyncio
from types import SimpleNamespace

import pytest
from relayed import Pipe

from protocols.daemon.hivemind_imports import PeerID
from protocols.p2pd.chunk_streams import STREAMS_PER_PEER, STREAMS_PER_RANGE, STREAMS_SERVED, ChunkService
from protocols.signed.identity import Identity


def info(number: int, address: str) -> SimpleNamespace:
    peer = Identity.from_seed(f"asker {number}".encode()).peer_id
    return SimpleNamespace(peer_id=PeerID.from_base58(peer), addr=address)


@pytest.mark.parametrize(
    ("keys", "network", "places"),
    [(1, "8.8.4", STREAMS_PER_PEER), (100, "8.8.4", STREAMS_PER_RANGE), (100, "192.168.1", STREAMS_SERVED)],
    ids=["one key", "one network", "a lab"],
)
async def test_a_greedy_asker_leaves_places_for_others(keys, network, places):
    service, streams, tasks = ChunkService(), [], []

    async def ask(number, address):
        reader = asyncio.StreamReader()
        writer = Pipe(asyncio.StreamReader())
        streams.append((reader, writer))
        tasks.append(asyncio.create_task(service.accept(info(number, address), reader, writer)))
        await asyncio.sleep(0)
        return not writer.ended

    got = [await ask(number % keys, f"/ip4/{network}.{number}/tcp/1") for number in range(100)]
    assert sum(got) == places
    assert await ask(1000, "/ip4/8.8.8.8/tcp/1") is (places < STREAMS_SERVED)
    for reader, _ in streams:
        reader.feed_eof()
    await asyncio.gather(*tasks)
    assert await ask(0, f"/ip4/{network}.1/tcp/1"), "a stream that ends frees its place"
    streams[-1][0].feed_eof()
    await asyncio.gather(*tasks)
