"""Work on several processes at once. They end with the one that started them, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def pool(jobs: int, begin: Callable[..., None] | None = None, *told: object) -> ProcessPoolExecutor:
    """So many processes, at most one per processor; fresh ones, as torch's threads do not survive a fork.
    Each calls `begin(*told)` first."""
    spawning = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        min(jobs, os.cpu_count() or 1), mp_context=spawning, initializer=_begin, initargs=(begin, told)
    )


def _begin(begin: Callable[..., None] | None, told: tuple[object, ...]) -> None:
    """A pool's process waits for work on a pipe of which it holds both ends: one that was killed would never
    be missed."""
    threading.Thread(target=_end_with_parent, name="watch the parent", daemon=True).start()
    if begin is not None:
        begin(*told)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool's process has one"
    parent.join()
    os._exit(1)
