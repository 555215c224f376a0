"""Check which GPUs torch sees, and why it sees none."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peers.config.errors import UserError, how_to_install
from peers.config.peer_file import PeerFile
from peers.tools.doctor.line import CheckResult, gibibytes
from peers.tools.doctor.machine_checks import pinned
from swarmnet.model.computing.choices import Computing

NVIDIA, AMD = "0x10de", "0x1002"
"""PCI vendor ids."""
UNTESTED = (
    "compare its loss with that of others (`swarmnet top`); if it differs, set device: cpu in the peer file"
)


@dataclass(frozen=True, slots=True)
class Graphics:
    """State of the GPUs and of torch on this machine; `judge` turns it into a result."""

    torch: str
    """Version of torch; empty: it cannot be imported."""
    torch_error: str = ""
    cuda_build: str | None = None
    """CUDA version that torch was built for."""
    rocm_build: str | None = None
    devices: tuple[tuple[str, int, int], ...] = ()
    """Name, free bytes and total bytes of each GPU that torch sees."""
    vendors: frozenset[str] = frozenset()
    """PCI vendors of this machine's display controllers."""
    driver: str | None = None
    """Version of the NVIDIA driver; None: it is not loaded."""
    nodes: bool = True
    """Whether /dev has device nodes of the GPUs."""
    library: bool = True
    """Whether NVIDIA's library for Python is installed."""
    windows: Literal["", "gpu", "cuda"] = ""
    """What Windows passes on to WSL2: nothing (or this is no WSL2), a GPU, or also NVIDIA's driver."""


def look(
    pci: Path = Path("/sys/bus/pci/devices"), proc: Path = Path("/proc/driver/nvidia/version")
) -> Graphics:
    """Return what torch and the system report about GPUs. Imports torch."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Graphics("", str(error)[:200])
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            devices.append((torch.cuda.get_device_name(index), free, total))
    return Graphics(
        str(torch.__version__),
        "",
        torch.version.cuda,
        torch.version.hip,
        tuple(devices),
        _vendors(pci),
        _driver(proc),
        Path("/dev/nvidiactl").exists(),
        importlib.util.find_spec("pynvml") is not None,
        _windows(),
    )


def _vendors(pci: Path) -> frozenset[str]:
    """Return the vendors of all devices of PCI class 3, which holds displays and GPUs."""
    found = set()
    for device in pci.glob("*"):
        try:
            if (device / "class").read_text().startswith("0x03"):
                found.add((device / "vendor").read_text().strip())
        except OSError:
            continue
    return frozenset(found)


def _windows() -> Literal["", "gpu", "cuda"]:
    if not Path("/dev/dxg").exists():
        return ""
    return "cuda" if any(Path("/usr/lib/wsl/lib").glob("libcuda.so*")) else "gpu"


def _driver(proc: Path) -> str | None:
    try:
        found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", proc.read_text())
    except OSError:
        return None
    return found[1] if found else "unknown"


def torch_line(found: Graphics) -> CheckResult:
    install = f"{sys.executable} -m pip install --force-reinstall {pinned('torch')}"
    if not found.torch:
        return CheckResult("torch", "fail", f"torch cannot be imported: {found.torch_error}", install)
    built = f"for CUDA {found.cuda_build}" if found.cuda_build else "for the CPU"
    text = f"torch {found.torch}, built " + (f"for ROCm {found.rocm_build}" if found.rocm_build else built)
    wanted = pinned("torch").rpartition("==")[2]
    data = {"version": found.torch, "cuda": found.cuda_build, "rocm": found.rocm_build}
    if wanted and found.torch.partition("+")[0] != wanted:
        text += f"; this program is tested with {wanted}, and another may compute other weights"
        return CheckResult("torch", "warn", text, install, data)
    return CheckResult("torch", "ok", text, data=data)


def judge(found: Graphics, wish: str) -> CheckResult:
    """Return the result of the check `gpu`. `wish`: `device` of the peer file. Without a GPU the CPU trains,
    so only `device: cuda` fails then."""
    data = {
        "devices": [
            {"name": name, "free_bytes": free, "total_bytes": total} for name, free, total in found.devices
        ]
    }
    if found.devices:
        name, free, total = found.devices[0]
        more = f" and {len(found.devices) - 1} more" if len(found.devices) > 1 else ""
        text = f"torch sees {name}, {gibibytes(free)} of {gibibytes(total)} free{more}"
        if found.rocm_build is not None and wish != "cpu":
            return CheckResult(
                "gpu", "warn", f"{text}; no AMD GPU was tested with this program", UNTESTED, data
            )
        if free < total / 2 and wish != "cpu":
            return CheckResult(
                "gpu", "warn", f"{text}: another program uses it", "nvidia-smi   shows which", data
            )
        return CheckResult("gpu", "ok", text, data=data)
    why, fix = _why_none(found)
    if wish == "cuda":
        return CheckResult(
            "gpu", "fail", f"device is cuda, but {why}", fix or "set device: cpu in the peer file", data
        )
    return CheckResult(
        "gpu", "warn" if fix and wish != "cpu" else "ok", why, fix if wish != "cpu" else "", data
    )


def as_asked(config: PeerFile) -> tuple[Computing, CheckResult | None]:
    """Return how this machine would compute a stage; a failed result if the peer file asks for another."""
    from peers.compute.stage_part import computing_of, device_of

    try:
        return computing_of(config.compute, device_of(config.device)), None
    except UserError as error:
        what, _, fix = str(error).partition("; ")
        return Computing(), CheckResult("gpu", "fail", what, fix)


def unwatched(found: Graphics, wish: str, only_when_idle: bool) -> CheckResult | None:
    """Return a warning if the peer is to pause for other programs on the GPU but cannot see them."""
    if not (only_when_idle and found.devices) or wish == "cpu" or found.library or found.rocm_build:
        return None
    text = "limits.only_when_idle sees no programs on the GPU: NVIDIA's library for Python is not installed"
    return CheckResult("gpu", "warn", text, how_to_install("gpu"), {"library": False})


def _why_none(found: Graphics) -> tuple[str, str]:
    """Return why torch sees no GPU, and what to do about it; the fix is empty if there is no GPU."""
    cores = os.cpu_count() or 1
    if found.windows == "gpu":
        return (
            f"Windows passes a GPU on to WSL2, but no NVIDIA driver; trains on {cores} CPU cores",
            "for an NVIDIA GPU, install its driver in Windows (not in WSL2), then type in PowerShell: "
            "wsl --shutdown",
        )
    if found.windows and found.cuda_build is not None:
        return (
            f"the NVIDIA driver of Windows is too old for torch's CUDA {found.cuda_build}, or does not work",
            "update the driver in Windows (not in WSL2), then type in PowerShell: wsl --shutdown",
        )
    if found.windows or NVIDIA in found.vendors or found.driver is not None:
        if found.cuda_build is None:
            wheel = f"{sys.executable} -m pip install --force-reinstall {pinned('torch')}"
            return (
                "an NVIDIA GPU is there, but this torch is built without CUDA",
                f"{wheel}   (Linux: with CUDA)",
            )
        if found.driver is None:
            return (
                "an NVIDIA GPU is there, but its driver is not loaded",
                "sudo ubuntu-drivers install && sudo reboot   (Debian: sudo apt install nvidia-driver)",
            )
        if not found.nodes:
            return (
                "an NVIDIA GPU and its driver are there, but not in this container",
                "start the container with: docker run --gpus all ...",
            )
        return (
            f"NVIDIA driver {found.driver} is too old for torch's CUDA {found.cuda_build}, or does not work",
            "nvidia-smi   shows which; a newer driver: sudo ubuntu-drivers install && sudo reboot",
        )
    if AMD in found.vendors and found.rocm_build is None:
        return (
            f"an AMD GPU is there, but this torch is not built for ROCm; trains on {cores} CPU cores",
            f"install the ROCm build of {pinned('torch')} (torch's page 'Get started'), if ROCm knows it",
        )
    if AMD in found.vendors:
        return (
            f"an AMD GPU is there, but ROCm {found.rocm_build} does not see it; trains on {cores} CPU cores",
            "sudo usermod -aG render,video $USER   (in a container: --device /dev/kfd --device /dev/dri)",
        )
    if platform.system() == "Darwin":
        return f"Apple's GPU is not supported; trains on {cores} CPU cores", ""
    return f"no GPU that torch can use in this machine; trains on {cores} CPU cores", ""
