"""Memory: the machine's, what of it this process holds, and giving back what is no longer used."""

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
"""Tasks and threads that have just ended hold what they worked with for a moment."""
MOST_LOOKS = 10
"""With a pause's 3 s until the stage is cut (roles/pausing.py), within the 5 s that are promised."""
UNKNOWN_MEMORY_BYTES = 4 << 30
"""Assumed where the system does not tell (Windows)."""


def resident_bytes() -> int:
    """What of this process lies in the machine's memory."""
    return int(psutil.Process().memory_info().rss)


async def let_go(of: Callable[[], object | None]) -> int:
    """Give memory back until nothing holds any more what this weak reference is to, and once again then; the
    bytes that are resident afterwards. What is held by a mistake is not waited for longer than 1.5 s."""
    for _ in range(MOST_LOOKS):
        await asyncio.sleep(LET_GO_SECONDS)
        gone = of() is None
        give_back()
        if gone:
            break
    return resident_bytes()


def give_back() -> None:
    """Collect what is only reachable in circles, and hand free memory to the system and the GPU's driver.

    glibc keeps freed memory for itself: without the trim a peer of 25 M parameters that dropped everything
    still held most of it (docs/volunteer.md)."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    trim()


def trim() -> None:
    """Hand free memory to the system: glibc keeps what graphs and steps of many sizes leave between them."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not.
        if malloc_trim is not None:
            malloc_trim(0)


def memory_bytes(device: torch.device) -> int:
    """The memory that tensors on `device` share with everything else there."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY_BYTES
