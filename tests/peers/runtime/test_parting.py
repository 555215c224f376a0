"""Work that ends when a peer is told to leave."""

from __future__ import annotations

import asyncio

import pytest
from clocks import on_virtual_clock

from peers.runtime.supervision import Left, until_left


async def done_after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@on_virtual_clock
async def test_work_that_ends_first_gives_what_it_has_to_give():
    assert await until_left(asyncio.Event(), done_after(5.0)) == "done"
    with pytest.raises(TimeoutError):
        await until_left(asyncio.Event(), asyncio.wait_for(done_after(5.0), 1.0))


@on_virtual_clock
async def test_work_is_ended_and_waited_for_once_the_peer_is_to_leave():
    ended: list[float] = []

    async def work() -> None:
        try:
            await done_after(60.0)
        finally:
            await asyncio.sleep(1.0)
            ended.append(clock())

    clock = asyncio.get_running_loop().time
    began, leaving = clock(), asyncio.Event()
    asyncio.get_running_loop().call_later(5.0, leaving.set)
    with pytest.raises(Left):
        await until_left(leaving, work())
    assert [round(at - began, 3) for at in ended] == [6.0]


@on_virtual_clock
async def test_who_is_to_leave_already_waits_for_nothing():
    leaving = asyncio.Event()
    leaving.set()
    began = asyncio.get_running_loop().time()
    with pytest.raises(Left):
        await until_left(leaving, done_after(60.0))
    assert asyncio.get_running_loop().time() == began
