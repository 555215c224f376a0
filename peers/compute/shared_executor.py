"""One compute thread for the several workers of a process, with its priorities among all of them.

Each worker has a `ComputeShare`, which to it is a compute like any other, and a slower one: what a microbatch
takes of this computer is what it takes in all the stages that are held here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from peers.compute.executor import UPDATE, Compute

Shared = TypeVar("Shared", bound=Compute)
Result = TypeVar("Result")


class SharedCompute(Generic[Shared]):
    """The compute lives while some worker has a share of it: a pause of all of them ends its thread."""

    def __init__(self, make: Callable[[], Shared]) -> None:
        self._make = make
        self.compute: Shared | None = None
        self.shares: list[ComputeShare] = []

    def share(self) -> ComputeShare:
        """For one worker, until it closes it."""
        if self.compute is None:
            self.compute = self._make()
        share = ComputeShare(self.compute, self.shares, self._closed)
        self.shares.append(share)
        return share

    async def _closed(self) -> None:
        if not self.shares and self.compute is not None:
            compute, self.compute = self.compute, None
            await compute.close()


class ComputeShare:
    """`Compute` of one worker among several."""

    def __init__(self, compute: Compute, shares: list[ComputeShare], closed: Callable[[], Any]) -> None:
        self.failed = compute.failed
        """Of all: work of one that fails ends the process, and so them all."""
        self.seconds = 0.0
        """What a microbatch takes in this worker's stage; 0: not measured yet."""
        self._compute, self._shares, self._tell_closed = compute, shares, closed
        self._closed = False
        self._submitted = self._begun = 0

    @property
    def queued(self) -> int:
        """Only of this worker."""
        return max(0, self._submitted - self._begun)

    @property
    def busy_seconds(self) -> float:
        """See `Compute`; whoever's work it was: each stage's idle share is that of the thread."""
        return self._compute.busy_seconds

    @property
    def rested_seconds(self) -> float:
        """See `Compute`; of the thread."""
        return self._compute.rested_seconds

    def working_seconds(self) -> float:
        """See `Compute`; whoever's work it is."""
        return self._compute.working_seconds()

    def occupied(self, seconds: float) -> float:
        """What a microbatch takes in all stages of this computer. Whoever is told the sum sends each stage
        what the computer can do in all of them; told its own seconds, each would be sent several times that.
        It does not depend on who is sent how much, so it does not swing."""
        self.seconds = seconds
        return sum(share.seconds for share in self._shares)

    def stretched(self, seconds: float) -> float:
        """See `Compute`: as much longer as all stages together take."""
        whole = sum(share.seconds for share in self._shares)
        return seconds * whole / self.seconds if self.seconds > 0 else seconds

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        if not self._closed:
            self._submitted += 1
            self._compute.submit(priority, partial(self._work, work), partial(self._done, done))

    def _work(self, work: Callable[[], Result]) -> Result | None:
        """Where the compute works."""
        self._begun += 1
        return None if self._closed else work()

    def _done(self, done: Callable[[Any, float], None], result: object, seconds: float) -> None:
        if not self._closed:
            done(result, seconds)

    async def close(self) -> None:
        """Finish what runs, drop what waits; the others' work goes on."""
        if self._closed:
            return
        self._closed = True
        idle = asyncio.get_running_loop().create_future()
        # Behind what runs now: whatever of this worker comes later does nothing.
        self._compute.submit(UPDATE, lambda: None, lambda _result, _seconds: idle.set_result(None))
        try:
            await idle
        finally:
            self._shares.remove(self)
            await self._tell_closed()
