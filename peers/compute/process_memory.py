"""Measure the machine's memory and this process's part, and return freed memory to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections.abc import Callable

import psutil
import torch

LET_GO_SECONDS = 0.15
"""Interval between attempts. Tasks and threads that have just ended keep their objects for a moment."""
MAX_LOOKS = 10
"""Maximum number of attempts. With the 3 s of a pause until the stage is dropped
(`peers/worker/pause/pausing.py`), this stays within the promised 5 s."""
UNKNOWN_MEMORY_BYTES = 4 << 30
"""Assumed memory if the system does not report it (Windows)."""


def resident_bytes() -> int:
    """Return the bytes of this process in the machine's memory."""
    return int(psutil.Process().memory_info().rss)


async def free_until_deleted(of: Callable[[], object | None]) -> int:
    """Free memory repeatedly until an object is deleted, and once more then. `of` is a weak reference to it:
    its call returns the object, or None once that is deleted. Returns the process's resident bytes. Gives up
    after 1.5 s if something still holds the object."""
    for _ in range(MAX_LOOKS):
        await asyncio.sleep(LET_GO_SECONDS)
        is_deleted = of() is None
        release_memory()
        if is_deleted:
            break
    return resident_bytes()


def release_memory() -> None:
    """Collect cyclic garbage, and return free memory to the system and the GPU's driver. glibc keeps freed
    memory until `trim`. Without it, a peer of 25 M parameters that dropped everything still had most of its
    memory (docs/volunteer.md)."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    trim()


TRIM_SECONDS = 30.0
"""Interval for returning free memory to the system. Without it, a stage of 2.2 M parameters kept 200 MB more
than it used after 500 rounds."""


def trim() -> None:
    """Return free memory to the system. glibc keeps the gaps that graphs and steps of many sizes leave."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not.
        if malloc_trim is not None:
            malloc_trim(0)


async def trim_forever() -> None:
    """Return free memory to the system every TRIM_SECONDS, until cancelled."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim)


def memory_bytes(device: torch.device) -> int:
    """Return the total memory of `device` in bytes: GPU memory for CUDA, otherwise the machine's RAM. All
    programs share it. Returns `UNKNOWN_MEMORY_BYTES` if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY_BYTES
