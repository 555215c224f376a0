"""Measure the GPU that a peer computes on, for the metrics.

torch reports its memory. NVIDIA's library (extra `gpu`) reports load, temperature and power if it is
installed. Values that cannot be read have no series.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import ModuleType

import torch

from peers.config.errors import how_to_install
from peers.telemetry.metrics import PeerMetrics

LOOK_SECONDS = 5.0
"""Sample interval. The library averages over up to a second; reading it wakes a sleeping GPU."""
MILLIWATTS = 1000.0
INSTALL = how_to_install("gpu")
"""Instructions to install NVIDIA's library (the extra `gpu`)."""


@dataclass(frozen=True, slots=True)
class GpuSensors:
    """Sensor values. None means that this GPU or its driver does not report the value."""

    load: float | None = None
    """Share of the last moment in which some program computed on it, 0 to 1."""
    celsius: float | None = None
    watts: float | None = None


class Nvml:
    """Reads one GPU through NVIDIA's library."""

    def __init__(self, library: ModuleType, device: object) -> None:
        self._library = library
        self._device = device

    def limit_watts(self) -> float | None:
        """Return the most power that the driver lets the GPU take, in watts; None if unknown."""
        try:
            return float(self._library.nvmlDeviceGetEnforcedPowerLimit(self._device)) / MILLIWATTS
        except self._library.NVMLError:
            return None

    def read(self) -> GpuSensors:
        """Return the current load (0 to 1), temperature and power; None if the GPU does not report the value.
        The library answers with a number, or for the load with a structure whose `gpu` is in percent."""
        library, device = self._library, self._device

        def query(function: str, *arguments: object) -> float | None:
            try:
                answer = getattr(library, function)(device, *arguments)
            except library.NVMLError:  # Many laptops' GPUs do not report their power.
                return None
            return float(getattr(answer, "gpu", answer))

        percent = query("nvmlDeviceGetUtilizationRates")
        milliwatts = query("nvmlDeviceGetPowerUsage")
        return GpuSensors(
            load=percent / 100.0 if percent is not None else None,
            celsius=query("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
            watts=milliwatts / MILLIWATTS if milliwatts is not None else None,
        )


class NoReading(Exception):
    """NVIDIA's library cannot be used for a GPU; the message has the reason and a remedy."""


def in_library(device: torch.device) -> tuple[ModuleType, object]:
    """Return NVIDIA's library and its handle of the GPU that torch calls `device`. Raises NoReading, with the
    reason, if the library is missing or does not know the GPU."""
    if torch.version.hip is not None:  # A GPU of AMD.
        raise NoReading("only NVIDIA's tell what runs on them")
    try:
        import pynvml
    except ImportError:
        raise NoReading(f"NVIDIA's library for Python is not installed; {INSTALL}") from None
    try:
        pynvml.nvmlInit()
        # The UUID is used because CUDA_VISIBLE_DEVICES changes torch's numbers, not the library's.
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        raise NoReading(f"NVIDIA's library does not know it ({error}); nvidia-smi says more") from None


def nvml_of(device: torch.device) -> Nvml | None:
    """Return the reader of a GPU; None if NVIDIA's library is missing or does not know this GPU."""
    try:
        return Nvml(*in_library(device))
    except NoReading:
        return None


class GpuWatch:
    """Samples the GPU into the metrics; series appear with the first value."""

    def __init__(self, metrics: PeerMetrics, device: torch.device, nvml: Nvml | None) -> None:
        self._metrics = metrics
        self._device = device
        self._nvml = nvml
        self.joules = 0.0
        """Energy in joules that the GPU has used since the first sample, for all programs; 0 if unknown."""
        self._sampled_at = time.monotonic()

    async def run(self) -> None:
        """Sample until cancelled, in a thread because a driver may be slow."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Take one sample: set the GPU's metrics, and add the energy used since the last sample."""
        free, total = torch.cuda.mem_get_info(self._device)
        sensors = self._nvml.read() if self._nvml is not None else GpuSensors()
        now = time.monotonic()
        self.joules += (sensors.watts or 0.0) * (now - self._sampled_at)
        self._sampled_at = now
        gpu = self._metrics.gpu
        gpu.set("gpu_memory_used_ratio", (total - free) / total)
        gpu.set("gpu_utilization_ratio", sensors.load)
        gpu.set("gpu_temperature_celsius", sensors.celsius)
        gpu.set("gpu_power_watts", sensors.watts)
