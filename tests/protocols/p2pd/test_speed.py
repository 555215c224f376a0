"""The speed service, in memory: it gives what it says and no more, whatever strangers send."""

import asyncio
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from relayed import Stream

from peers.lab.world.virtual_time import run as run_virtual
from protocols.framing.upload_turns import Upload
from protocols.p2pd.speed_test import (
    BUSY,
    BYTES_LIMIT,
    DOWN,
    GO,
    PART_BYTES,
    PER_MINUTE,
    PER_PEER,
    REFUSED_LIMIT,
    REQUEST_SECONDS,
    SERVE_SECONDS,
    TURN_SECONDS,
    WAITING_LIMIT,
    SpeedService,
)


def request(direction, count):
    return bytes([direction]) + count.to_bytes(4, "big")


async def served(service, data, peer="12D3KooW"):
    """All that comes back on one stream, on which `data` is sent and then nothing."""
    stream = Stream()
    stream.to_service.feed_data(data)
    stream.to_service.feed_eof()
    await service.accept(SimpleNamespace(peer_id=peer), stream.to_service, stream)
    assert stream.ended
    return await stream.to_asker.read()


def test_down_gives_the_bytes_asked_for_and_up_counts_those_that_came():
    async def both():
        service = SpeedService()
        return (
            await served(service, request(DOWN, 100_000)),
            await served(service, request(0, 2 * PART_BYTES) + bytes(2 * PART_BYTES)),
        )

    down, up = run_virtual(both())
    assert down == GO + bytes(100_000)
    assert up == GO + PART_BYTES.to_bytes(4, "big") + (2 * PART_BYTES).to_bytes(4, "big")


def test_nobody_gets_more_bytes_than_the_limit():
    assert run_virtual(served(SpeedService(), request(DOWN, BYTES_LIMIT + 1))) == b""


def test_nobody_is_measured_for_without_end():
    async def often():
        service = SpeedService()
        same = [await served(service, request(DOWN, 1)) for _ in range(PER_PEER + 1)]
        others = [await served(service, request(DOWN, 1), f"peer {n}") for n in range(PER_MINUTE)]
        await asyncio.sleep(61)
        return same, others, await served(service, request(DOWN, 1))

    same, others, later = run_virtual(often())
    assert same[-1] == BUSY
    assert [each == BUSY for each in others] == [n >= PER_MINUTE - PER_PEER for n in range(PER_MINUTE)]
    assert later == GO + b"\0"


def test_one_that_asks_and_then_stalls_is_cut_off():
    async def stall():
        service, stream = SpeedService(), Stream()
        serving = service.accept(SimpleNamespace(peer_id="x"), stream.to_service, stream)
        await serving
        return asyncio.get_running_loop().time(), stream.ended

    seconds, ended = run_virtual(stall())
    assert ended
    assert seconds <= SERVE_SECONDS + 1


def test_one_that_says_nothing_does_not_hold_the_place():
    async def silent():
        service, stream = SpeedService(), Stream()
        await service.accept(SimpleNamespace(peer_id="x"), stream.to_service, stream)
        return asyncio.get_running_loop().time(), await served(service, request(DOWN, 1), "y")

    seconds, answer = run_virtual(silent())
    assert seconds <= REQUEST_SECONDS < 5.0
    assert answer == GO + b"\0"


def asking(service, streams):
    return [
        asyncio.create_task(service.accept(SimpleNamespace(peer_id=f"x{n}"), each.to_service, each))
        for n, each in enumerate(streams)
    ]


def test_few_wait_for_their_turn_and_whoever_comes_then_is_hung_up_on():
    async def crowd():
        service, streams = SpeedService(), [Stream() for _ in range(1 + WAITING_LIMIT + 500)]
        streams[0].to_service.feed_data(request(0, PART_BYTES))
        tasks = asking(service, streams)
        await asyncio.sleep(TURN_SECONDS / 2)
        waiting = [not stream.ended for stream in streams]
        await asyncio.sleep(60)
        late = sum(not stream.ended for stream in streams)
        await asyncio.gather(*tasks)
        return waiting, late, await served(service, request(DOWN, 1), "y")

    waiting, late, then = run_virtual(crowd())
    assert waiting == [True] * (1 + WAITING_LIMIT) + [False] * 500
    assert late == 0
    assert then == GO + b"\0", "places to wait in are free again"


def test_those_who_wait_are_cut_off_when_the_service_ends():
    async def end():
        service, streams = SpeedService(), [Stream() for _ in range(3)]
        tasks = asking(service, streams)
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(service.close())
        await asyncio.sleep(0)
        cut = [stream.ended for stream in streams]
        await asyncio.gather(closing, *tasks)
        return cut

    assert run_virtual(end()) == [True] * 3


def test_what_is_sent_keeps_the_limit_of_the_upload_and_goes_behind_all_else():
    async def measured():
        service, loop = SpeedService(), asyncio.get_running_loop()
        service.upload = upload = Upload(100_000.0)
        serving = asyncio.create_task(served(service, request(DOWN, 500_000)))
        await asyncio.sleep(1.0)
        began = loop.time()
        await upload.turn(1, 1)
        waited = loop.time() - began
        return await serving, loop.time(), waited

    answer, seconds, waited = run_virtual(measured())
    assert answer == GO + bytes(500_000)
    assert 4.5 < seconds < 5.5
    assert waited < 0.2, "a gradient waits for one piece at most"


def test_a_measurement_that_is_cut_off_for_its_time_leaves_nobody_waiting_for_upload():
    async def measured():
        service = SpeedService()
        service.upload = upload = Upload(1000.0)
        await served(service, request(DOWN, 500_000))
        ended = asyncio.get_running_loop().time()
        await upload.turn(1, 3)
        return ended, upload._waiting

    ended, waiting = run_virtual(measured())
    assert ended <= SERVE_SECONDS + 1
    assert waiting == {}


def test_one_that_is_told_busy_is_not_hung_up_on_before_it_can_have_read_so():
    async def refuse():
        service, stream = SpeedService(), Stream()
        for _ in range(PER_PEER):
            await served(service, request(DOWN, 1), "x")
        stream.to_service.feed_data(request(DOWN, 1))
        serving = asyncio.create_task(service.accept(SimpleNamespace(peer_id="x"), stream.to_service, stream))
        answer = await stream.to_asker.readexactly(1)
        await asyncio.sleep(1)
        open_until_then = not stream.ended
        stream.to_service.feed_eof()
        await serving
        return answer, open_until_then, stream.ended

    assert run_virtual(refuse()) == (BUSY, True, True)


def test_those_who_do_not_hang_up_after_busy_are_few_and_cut_off():
    async def crowd():
        service, streams = SpeedService(), [Stream() for _ in range(PER_MINUTE + REFUSED_LIMIT + 1)]
        for n in range(PER_MINUTE):
            await served(service, request(DOWN, 1), f"peer {n}")
        for stream in streams:
            stream.to_service.feed_data(request(DOWN, 1))
        tasks = [
            asyncio.create_task(service.accept(SimpleNamespace(peer_id="x"), each.to_service, each))
            for each in streams
        ]
        await asyncio.sleep(1)
        at_once = sum(stream.ended for stream in streams)
        await asyncio.sleep(60)
        late = sum(stream.ended for stream in streams)
        await service.close()
        await asyncio.gather(*tasks)
        return len(streams) - at_once, len(streams) - late

    assert run_virtual(crowd()) == (REFUSED_LIMIT, 0)


@given(st.binary(max_size=100))
def test_bytes_of_strangers_harm_nobody(data):
    assert len(run_virtual(served(SpeedService(), data))) <= 1 + BYTES_LIMIT
