"""Measure how much of this machine other programs use: cores, and the GPU if its driver reports it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Protocol

import psutil
import torch

from peers.compute.gpu import NoReading, in_library


class OtherUse:
    """Measures the CPU use of other programs between two calls. `own` are other processes of this peer."""

    def __init__(self) -> None:
        self._last_sample: tuple[float, float, float] | None = None
        """Time, busy seconds of all cores, and busy seconds of this peer."""

    def cores(self, own: Collection[int] = ()) -> float:
        """Return the mean number of cores that other programs used since the last call; 0 at the first one.
        `own` are ids of other processes of this peer."""
        now, busy, ours = time.monotonic(), _busy_seconds(), _own_seconds(own)
        last_sample = self._last_sample
        self._last_sample = (now, busy, ours)
        if last_sample is None:
            return 0.0
        last_now, last_busy, last_ours = last_sample
        if now <= last_now:
            return 0.0
        # `ours` shrinks if a process of this peer has ended.
        others = (busy - last_busy) - max(0.0, ours - last_ours)
        return max(0.0, others / (now - last_now))


def _busy_seconds() -> float:
    """Return the busy seconds of all cores since the machine started."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times[:8]) - idle)  # Guests' time, after the eighth, is in user time already.


def _own_seconds(processes: Collection[int]) -> float:
    """Return the CPU seconds of this process and of these others of the same peer."""
    own = time.process_time()
    for process in processes:
        try:
            times = psutil.Process(process).cpu_times()
            own += times.user + times.system
        except psutil.Error:
            pass  # The process has just ended; the next sample has the one that replaces it.
    return own


class GpuUse(Protocol):
    """Share of the GPU's time that other processes use."""

    def share(self) -> float | None:
        """Return the share; None if unknown."""


class NoGpu:
    """There is no relevant GPU, or no library to read it."""

    def share(self) -> float | None:
        return None


class Nvidia:
    """Reads a GPU through NVIDIA's library (extra `gpu`)."""

    def __init__(self, library: ModuleType, device: object) -> None:
        self.library = library
        self.device = device
        self._newest_sample = 0

    def share(self) -> float | None:
        """Return the share of the GPU's time that other processes used since the last call, 0 to 1. The
        library has samples of each process, in percent, that are newer than a given time."""
        try:
            samples = self.library.nvmlDeviceGetProcessUtilization(self.device, self._newest_sample)
        except self.library.NVMLError:  # Also raised if nothing has run since.
            return 0.0
        self._newest_sample = max((sample.timeStamp for sample in samples), default=self._newest_sample)
        others = [sample.smUtil for sample in samples if sample.pid != os.getpid()]
        return min(1.0, float(sum(others)) / 100.0)


def gpu_use(device: torch.device, wanted: bool, warn: Callable[[str], None]) -> GpuUse:
    """Return the reader for the GPU on which this peer computes; a reader without values if there is none or
    `wanted` is False. `warn` is called if the GPU cannot be read: `only_when_idle` then ignores it."""
    if not wanted or device.type != "cuda":
        return NoGpu()
    try:
        return Nvidia(*in_library(device))
    except NoReading as error:
        warn(f"only_when_idle sees other programs on the processor only, not on the GPU: {error}")
        return NoGpu()
