"""A pool of processes that end with the process that started them, even if that is killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def pool(
    jobs: int, begin: Callable[..., None] | None = None, *arguments: object
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of `jobs` processes, at most one per CPU. Each calls `begin(*arguments)` first.

    The processes are spawned, because torch's threads do not survive a fork. If the block ends with an
    exception, such as SIGTERM's, the work that is under way or queued is given up and the processes end.
    """
    spawning = multiprocessing.get_context("spawn")
    processes = ProcessPoolExecutor(
        min(jobs, os.cpu_count() or 1), mp_context=spawning, initializer=_begin, initargs=(begin, arguments)
    )
    before = set(multiprocessing.active_children())
    try:
        yield processes
    except BaseException:
        processes.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    processes.shutdown()


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
