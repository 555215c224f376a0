"""The compute thread of a peer that shares its machine."""

from __future__ import annotations

import asyncio
import time

import pytest

from peers.compute.executor import FORWARD, ThreadCompute


async def worked(share: float) -> tuple[float, float]:
    """(processor seconds of a piece of work, seconds that it was said to take)"""
    compute = ThreadCompute(share)
    said: asyncio.Future[tuple[float, float]] = asyncio.get_running_loop().create_future()

    def work() -> float:
        began = time.thread_time()
        while time.thread_time() < began + 0.01:
            pass
        return time.thread_time() - began

    compute.submit(FORWARD, work, lambda used, seconds: said.set_result((used, seconds)))
    async with asyncio.timeout(20.0):
        result = await said
    await compute.close()
    return result


@pytest.mark.parametrize("share", [0.25, 0.5])
async def test_a_share_of_the_time_counts_as_slowness_so_that_others_send_it_less(share):
    used, seconds = await worked(share)
    assert seconds >= used / share
