"""A pool of processes that end with the process that started them, even if that is killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def pool(jobs: int, begin: Callable[..., None] | None = None, *arguments: object) -> ProcessPoolExecutor:
    """Return a pool of `jobs` processes, at most one per CPU. Each calls `begin(*arguments)` first.

    The processes are spawned, because torch's threads do not survive a fork.
    """
    spawning = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        min(jobs, os.cpu_count() or 1), mp_context=spawning, initializer=_begin, initargs=(begin, arguments)
    )


def _begin(begin: Callable[..., None] | None, arguments: tuple[object, ...]) -> None:
    """Start a process of the pool, with a thread that ends it with its parent.

    It waits for work on a pipe of which it has both ends, so it would not notice that its parent was killed.
    """
    threading.Thread(target=_end_with_parent, name="watch the parent", daemon=True).start()
    if begin is not None:
        begin(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process of the pool has a parent"
    parent.join()
    os._exit(1)
