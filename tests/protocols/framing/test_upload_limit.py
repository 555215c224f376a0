"""What a peer file's `limits.upload` does to real links and to the chunks that a peer serves."""

import asyncio
import time

import pytest
from two_peers import two_peers

from peers.lab.world.virtual_time import run
from protocols.framing.upload_turns import NO_LIMIT, Upload
from protocols.messages.table import Act, Bye
from protocols.p2pd.chunk_streams import PART_BYTES, ChunkService
from protocols.p2pd.speed_test import measure

RATE = 2_000_000


async def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@pytest.mark.loopback
async def test_links_keep_the_limit_together_and_control_overtakes(tmp_path):
    act = Act("peer", 1, 1, 1, 10.0, (1, 1, 1))
    async with two_peers(tmp_path) as (sender, taker, heard):
        sender.limit_upload(Upload(RATE))
        links = [await sender.open(taker.peer, lane, 10.0, taker.addresses) for lane in ("data", "group")]
        began = time.monotonic()
        for _ in range(3):
            links[0].post(act, bytes(1_000_000))
        await asyncio.sleep(0.05)
        links[1].post(Bye("control"))
        await until(lambda: sum(isinstance(what, Act) for _, what, _ in heard.messages) == 3)
        seconds = heard.messages[-1][0] - began
        order = [type(what) for _, what, _ in heard.messages]
    assert seconds > 0.9 * 3_000_000 / RATE - 0.2
    assert order in ([Bye, Act, Act, Act], [Act, Bye, Act, Act]), "the Bye did not wait for three megabytes"


@pytest.mark.loopback
async def test_what_waits_for_its_turn_is_said_before_the_link_closes(tmp_path):
    async with two_peers(tmp_path) as (sender, taker, heard):
        sender.limit_upload(Upload(RATE))
        link = await sender.open(taker.peer, "group", 10.0, taker.addresses)
        await sender.upload.turn(3 * RATE, 0)  # Three seconds' worth: whoever comes now waits.
        link.post(Bye("last words"))
        await asyncio.sleep(0.05)
        assert heard.messages == []
        link.close()
        await until(lambda: len(heard.messages) == 2)
    assert isinstance(heard.messages[0][1], Bye)


@pytest.mark.loopback
async def test_what_others_measure_keeps_the_limit_too(tmp_path):
    async with two_peers(tmp_path) as (sender, taker, _):
        sender.limit_upload(Upload(RATE))
        await taker.daemon.connect(sender.peer, sender.addresses, 10.0)
        rate = await measure(taker.daemon, sender.peer, "down")
    assert 0.5 * RATE < rate < 1.2 * RATE


async def test_chunks_are_served_in_parts_at_the_pace_that_is_allowed():
    loop, service, written = asyncio.get_running_loop(), ChunkService(), []

    class Writer:
        def write(self, data):
            written.append((loop.time(), len(data)))

        async def drain(self):
            pass

    service.upload = Upload(20 * PART_BYTES)
    began = loop.time()
    await service._write(Writer(), memoryview(bytes(10 * PART_BYTES)))
    assert [size for _, size in written] == [PART_BYTES] * 10
    assert written[-1][0] - began > 0.25, "ten twentieths of a second, less what may go at once"


async def test_whoever_gives_up_waiting_frees_the_place():
    upload = Upload(1000.0)
    await upload.turn(600, 0)
    gone = asyncio.create_task(upload.turn(10_000, 0))
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    async with asyncio.timeout(5.0):
        await upload.turn(1, 3)


def test_nobody_waits_for_ever_at_a_level_of_exactly_nothing():
    """On a virtual clock whoever is told to come back now, and then gets nothing, spins."""

    async def eight_pieces() -> float:
        upload = Upload(100_000.0)
        await asyncio.gather(*(upload.turn(65_536, 3) for _ in range(8)))
        return asyncio.get_running_loop().time()

    assert run(eight_pieces()) == pytest.approx((7 * 65_536 - 10_000) / 100_000, abs=1e-3)


@pytest.mark.loopback
async def test_a_limit_that_is_set_later_holds_for_links_that_are_open(tmp_path):
    act = Act("peer", 1, 1, 1, 10.0, (1, 1, 1))
    async with two_peers(tmp_path) as (sender, taker, heard):
        sender.upload = upload = Upload(NO_LIMIT)
        link = await sender.open(taker.peer, "data", 10.0, taker.addresses)
        link.post(act, bytes(1_000_000))
        await until(lambda: len(heard.messages) == 1)
        upload.limit(RATE)
        began = time.monotonic()
        for _ in range(2):
            link.post(act, bytes(1_000_000))
        await until(lambda: len(heard.messages) == 3)
        assert heard.messages[-1][0] - began > 0.9 * 2_000_000 / RATE - 0.2
        link.post(act, bytes(4_000_000))
        began = time.monotonic()
        await asyncio.sleep(0.05)
        upload.limit(NO_LIMIT)
        await until(lambda: len(heard.messages) == 4)
        assert heard.messages[-1][0] - began < 4_000_000 / RATE, "what waits is sent at once"
