"""This process's memory: how much of the machine's it holds, and giving back what is no longer used."""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil
import torch


def resident_bytes() -> int:
    """What of this process lies in the machine's memory."""
    return int(psutil.Process().memory_info().rss)


def give_back() -> None:
    """Collect what is only reachable in circles, and hand free memory to the system and the GPU's driver.

    glibc keeps freed memory for itself: without the trim a peer of 25 M parameters that dropped everything
    still held most of it (docs/volunteer.md)."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not.
        if trim is not None:
            trim(0)
