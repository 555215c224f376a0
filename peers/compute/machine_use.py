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
        self._seen: tuple[float, float, float] | None = None

    def cores(self, own: Collection[int] = ()) -> float:
        """Return the mean number of cores that others used since the last call; 0 at the first call."""
        now, busy, ours = time.monotonic(), _busy_seconds(), _own_seconds(own)
        before, self._seen = self._seen, (now, busy, ours)
        if before is None or now <= before[0]:
            return 0.0
        others = (busy - before[1]) - max(0.0, ours - before[2])
        return max(0.0, others / (now - before[0]))


def _busy_seconds() -> float:
    """Return the busy seconds of all cores since the machine started."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times[:8]) - idle)  # Guests' time, after the eighth, is in user time already.


def _own_seconds(processes: Collection[int]) -> float:
    own = time.process_time()
    for process in processes:
        try:
            times = psutil.Process(process).cpu_times()
            own += times.user + times.system
        except psutil.Error:
            pass  # It has just ended; the next sample has the new one.
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
        self.library, self.device = library, device
        self._newest = 0

    def share(self) -> float | None:
        try:
            samples = self.library.nvmlDeviceGetProcessUtilization(self.device, self._newest)
        except self.library.NVMLError:  # Also raised if nothing has run since.
            return 0.0
        self._newest = max((sample.timeStamp for sample in samples), default=self._newest)
        others = [sample.smUtil for sample in samples if sample.pid != os.getpid()]
        return min(1.0, float(sum(others)) / 100.0)


def gpu_use(device: torch.device, wanted: bool, warn: Callable[[str], None]) -> GpuUse:
    """Return the reader for the GPU on which this peer computes. `wanted` is whether the peer file uses it.
    `warn` is called if the GPU cannot be read, because `only_when_idle` then ignores it."""
    if not wanted or device.type != "cuda":
        return NoGpu()
    try:
        return Nvidia(*in_library(device))
    except NoReading as error:
        warn(f"only_when_idle sees other programs on the processor only, not on the GPU: {error}")
        return NoGpu()
