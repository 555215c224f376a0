"""Run coroutines as tasks that end with the object that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskSet:
    """The tasks of one object."""

    def __init__(self) -> None:
        self.stopped = False
        """True if no more tasks are started."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task; once stopped, do nothing."""
        if self.stopped:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Start no more tasks. Those that run continue."""
        self.stopped = True

    def cancel(self) -> None:
        """Start no more tasks, and cancel those that run."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
