"""One compute thread for the several workers of a process, with priorities among all of them.

Each worker has a `ComputeShare`, which acts as a slower compute of its own. Its reported time per microbatch
is that of all stages on this computer.
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
    """The shared compute exists while some worker has a share. If all workers pause, its thread ends."""

    def __init__(self, make: Callable[[], Shared]) -> None:
        self._make = make
        self.compute: Shared | None = None
        self.shares: list[ComputeShare] = []

    def share(self) -> ComputeShare:
        """Return a share for one worker, which must close it."""
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
    """The `Compute` of one worker among several."""

    def __init__(self, compute: Compute, shares: list[ComputeShare], closed: Callable[[], Any]) -> None:
        self.failed = compute.failed
        """Failure of the shared compute. It ends the process, and so all workers."""
        self.seconds = 0.0
        """Seconds of a microbatch in this worker's stage; 0 before the first measurement."""
        self._compute, self._shares, self._on_closed = compute, shares, closed
        self._closed = False
        self._submitted = self._begun = 0

    @property
    def queued(self) -> int:
        """Number of waiting work items of this worker."""
        return max(0, self._submitted - self._begun)

    @property
    def busy_seconds(self) -> float:
        """See `Compute`; for work of all workers, because each stage's idle share is that of the thread."""
        return self._compute.busy_seconds

    @property
    def rested_seconds(self) -> float:
        """See `Compute`; of the thread."""
        return self._compute.rested_seconds

    def working_seconds(self) -> float:
        """See `Compute`; for work of any worker."""
        return self._compute.working_seconds()

    def occupied(self, seconds: float) -> float:
        """Return the time of a microbatch in all stages of this computer. Senders that get this sum send each
        stage what the computer can do in all of them. With its own time each stage would get several times
        that. The sum does not depend on how work is distributed, so it does not oscillate."""
        self.seconds = seconds
        return sum(share.seconds for share in self._shares)

    def stretched(self, seconds: float) -> float:
        """See `Compute`; scaled by the time of all stages together."""
        whole = sum(share.seconds for share in self._shares)
        return seconds * whole / self.seconds if self.seconds > 0 else seconds

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        if not self._closed:
            self._submitted += 1
            self._compute.submit(priority, partial(self._work, work), partial(self._done, done))

    def _work(self, work: Callable[[], Result]) -> Result | None:
        """Run work in the compute thread."""
        self._begun += 1
        return None if self._closed else work()

    def _done(self, done: Callable[[Any, float], None], result: object, seconds: float) -> None:
        if not self._closed:
            done(result, seconds)

    async def close(self) -> None:
        """Finish the current work item and drop the others. Work of other workers continues."""
        if self._closed:
            return
        self._closed = True
        idle = asyncio.get_running_loop().create_future()
        # After the current work item: work of this worker that comes later does nothing.
        self._compute.submit(UPDATE, lambda: None, lambda _result, _seconds: idle.set_result(None))
        try:
            await idle
        finally:
            self._shares.remove(self)
            await self._on_closed()
