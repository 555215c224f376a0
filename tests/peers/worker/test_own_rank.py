"""The rank of one's own computer: from whose records, and how often the directory is asked for them."""

import asyncio

from observed import NOON, record
from swarm import sign, tiny_manifest

from peers.worker.watch import own_rank
from peers.worker.watch.own_rank import OwnRank, WorkerRank, rank_of


def test_the_rank_counts_workers_alone():
    others = [
        record("a", tokens=500).record, record("b", stage=1, tokens=50).record,
        record("paused", stage=-1, tokens=900).record, record("sums", role="reducer", tokens=900).record,
    ]  # fmt: skip
    assert rank_of(100, others) == WorkerRank(2, 3)
    assert rank_of(500, others) == WorkerRank(1, 3), "equals share a place"
    assert rank_of(0, others) is None
    assert rank_of(100, []) is None


async def test_the_directory_is_only_asked_while_the_rank_is_read(monkeypatch):
    asked = asyncio.Queue()

    async def found(directory, signed, me):
        asked.put_nowait(me)
        return {"a": record("a", tokens=500)}

    monkeypatch.setattr(own_rank, "found", found)
    rank = OwnRank("me")
    watching = asyncio.create_task(rank.watch(sign(tiny_manifest()), None, lambda: 100))
    await asyncio.sleep(0)
    assert asked.empty(), NOON
    assert rank.request() is None
    async with asyncio.timeout(5.0):
        assert await asked.get() == "me"
    await asyncio.sleep(0)
    assert rank.request() == {"place": 2, "workers": 2}
    rank.request()
    await asyncio.sleep(0)
    assert asked.empty(), "not again so soon"
    watching.cancel()
