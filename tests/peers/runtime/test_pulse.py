"""Whether the event loop turns and the compute thread works, and by how much the loop is late."""

import asyncio

import pytest

from peers.compute.executor import UPDATE, ThreadCompute
from peers.runtime.liveness import STUCK_SECONDS, Pulse


async def test_by_how_much_the_loop_was_late_is_told_once_a_second(monkeypatch):
    async def late(seconds):
        now[0] += seconds + 0.25

    now, told = [100.0], []
    monkeypatch.setattr("peers.worker.watch.sampler.asyncio.sleep", late)

    def hear(seconds):
        told.append(seconds)
        if len(told) == 3:
            raise StopIteration

    with pytest.raises(RuntimeError):
        await Pulse(lambda: now[0], hear).run()
    assert told == pytest.approx([0.25] * 3)


def test_a_loop_that_does_not_turn_is_told_and_one_that_turns_again_is_well():
    now = [100.0]
    pulse = Pulse(lambda: now[0])
    now[0] += STUCK_SECONDS
    assert pulse.problem() is None
    now[0] += 7
    assert pulse.problem() == f"the event loop has not turned for {STUCK_SECONDS + 7:.0f} s"

    async def turn_once():
        task = asyncio.create_task(pulse.run())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(turn_once())
    assert pulse.problem() is None


async def test_computing_that_ended_by_a_fault_is_told_with_the_fault():
    compute, pulse = ThreadCompute(), Pulse()
    pulse.fault = lambda: compute.failed.result() if compute.failed.done() else None
    assert pulse.problem() is None
    compute.submit(UPDATE, lambda: [].pop(), lambda result, seconds: None)
    await asyncio.wait_for(asyncio.shield(compute.failed), 10.0)
    assert pulse.problem() == "computing ended: IndexError: pop from empty list"
    await compute.close()
