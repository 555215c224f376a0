"""The GPU that a peer computes on, for the metrics: its memory by torch, and by NVIDIA's library what else it
knows (load, temperature, power), where that is installed (extra `gpu`). What cannot be told has no series.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import ModuleType

import torch

from peers.errors import how_to_install
from peers.telemetry.metrics import Metrics

LOOK_SECONDS = 5.0
"""The library takes its own means over up to a second; asking wakes a GPU that sleeps."""
MILLIWATTS = 1000.0
INSTALL = how_to_install("gpu")
"""What brings NVIDIA's library (the extra `gpu`)."""


@dataclass(frozen=True, slots=True)
class Senses:
    """None: this GPU or its driver does not tell."""

    load: float | None = None
    """Share of the last moment in which some program computed on it, 0 to 1."""
    celsius: float | None = None
    watts: float | None = None


class Nvml:
    """One GPU, asked through NVIDIA's library."""

    def __init__(self, library: ModuleType, device: object) -> None:
        self._library, self._device = library, device

    def read(self) -> Senses:
        library, device = self._library, self._device

        def told(name: str, *arguments: object) -> float | None:
            try:
                answer = getattr(library, name)(device, *arguments)
            except library.NVMLError:  # Many laptops' GPUs do not tell their power.
                return None
            return float(getattr(answer, "gpu", answer))

        load, watts = told("nvmlDeviceGetUtilizationRates"), told("nvmlDeviceGetPowerUsage")
        return Senses(
            load / 100.0 if load is not None else None,
            told("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
            watts / MILLIWATTS if watts is not None else None,
        )


class NotTold(Exception):
    """NVIDIA's library cannot be asked about a GPU; the message says why, and what helps."""


def in_library(device: torch.device) -> tuple[ModuleType, object]:
    """NVIDIA's library, and what it calls the GPU that torch calls `device`. Raises NotTold."""
    if torch.version.hip is not None:
        raise NotTold("only NVIDIA's tell what runs on them")
    try:
        import pynvml
    except ImportError:
        raise NotTold(f"NVIDIA's library for Python is not installed; {INSTALL}") from None
    try:
        pynvml.nvmlInit()
        # By its name for life: CUDA_VISIBLE_DEVICES gives other numbers than the library's.
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        raise NotTold(f"NVIDIA's library does not know it ({error}); nvidia-smi says more") from None


def nvml_of(device: torch.device) -> Nvml | None:
    """None: NVIDIA's library is not there, or does not know this GPU."""
    try:
        return Nvml(*in_library(device))
    except NotTold:
        return None


class GpuWatch:
    """Reads into the metrics; series appear with the first value."""

    def __init__(self, metrics: Metrics, device: torch.device, nvml: Nvml | None) -> None:
        self._metrics, self._device, self._nvml = metrics, device, nvml
        self.joules = 0.0
        """That the GPU has taken since the first look, whatever program used it; 0: it does not tell."""
        self._looked = time.monotonic()

    async def run(self) -> None:
        """Until cancelled. In a thread: a driver may take its time."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        free, total = torch.cuda.mem_get_info(self._device)
        senses = self._nvml.read() if self._nvml is not None else Senses()
        now = time.monotonic()
        self.joules += (senses.watts or 0.0) * (now - self._looked)
        self._looked = now
        gpu = self._metrics.gpu
        gpu.set("gpu_memory_used_ratio", (total - free) / total)
        gpu.set("gpu_utilization_ratio", senses.load)
        gpu.set("gpu_temperature_celsius", senses.celsius)
        gpu.set("gpu_power_watts", senses.watts)
