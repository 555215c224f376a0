"""Checks that need no network: Python, torch, memory, disk, open files, ports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from pathlib import Path

from peers.config.errors import how_to_install
from peers.config.peer_file import PeerFile
from peers.tools.doctor.line import CheckResult, gibibytes
from protocols.daemon.p2pd import OPEN_FILES, check_ports
from protocols.errors import CannotStart

PYTHONS = ((3, 11), (3, 14))
"""First supported version and first unsupported one (pyproject.toml)."""
MIN_MEMORY_BYTES = 1 << 30
"""Memory that a peer needs at least. A peer of the smallest run takes 0.5 GiB: torch, hivemind and p2pd
(measured: docs/doctor.md)."""
MIN_DISK_BYTES = 1 << 30
EASY_DISK_BYTES = 8 << 30
"""Disk space for a small stage: checkpoints, snapshots, the event log, and a second checkpoint while one
replaces another."""


def python() -> CheckResult:
    version, found = platform.python_version(), sys.version_info[:2]
    text = f"Python {version}, {platform.system()} {platform.machine()}"
    if PYTHONS[0] <= found < PYTHONS[1]:
        return CheckResult("python", "ok", text, data={"version": version})
    return CheckResult(
        "python",
        "fail",
        f"{text}; needed is 3.11, 3.12 or 3.13",
        "PYTHON=/path/to/python3.12 scripts/setup",
        {"version": version},
    )


def pinned(package: str) -> str:
    """Return what `pip install` needs for this program's version of a package, such as torch==2.13.0."""
    required = importlib.metadata.requires("swarmnet") or []
    found = [line.partition(";")[0].strip() for line in required if line.startswith(f"{package}==")]
    return found[0] if found else package


def memory(available_bytes: int, total_bytes: int) -> CheckResult:
    text = f"{gibibytes(available_bytes)} of {gibibytes(total_bytes)} free"
    data = {"available_bytes": available_bytes, "total_bytes": total_bytes}
    if available_bytes >= MIN_MEMORY_BYTES:
        return CheckResult("memory", "ok", text, data=data)
    text += f"; the smallest peer needs {gibibytes(MIN_MEMORY_BYTES)}"
    return CheckResult("memory", "fail", text, "end programs that use it: ps aux --sort=-rss | head", data)


def free_memory(proc: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return the (available, total) bytes of memory, within the limit of a container. Both are 0 if the
    system does not report them."""
    try:
        lines = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
        available, total = (int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError, IndexError):
        return 0, 0
    try:
        limit = int((groups / "memory.max").read_text())
        used = int((groups / "memory.current").read_text())
    except (OSError, ValueError):  # No limit ("max"), or no cgroup v2.
        return available, total
    return min(available, max(0, limit - used)), min(total, limit)


def disk(state: Path) -> CheckResult:
    place = next(folder for folder in (state, *state.absolute().parents) if folder.exists())
    if not os.access(place, os.W_OK):
        fix = f"sudo mkdir -p '{state}' && sudo chown $USER '{state}'"
        return CheckResult("disk", "fail", f"{state} cannot be written by this user", fix)
    free = shutil.disk_usage(place).free
    text, data = f"{gibibytes(free)} free for {state}", {"free_bytes": free, "state": str(state)}
    if free < MIN_DISK_BYTES:
        fix = "make room, or set state: /a/larger/disk in the peer file"
        return CheckResult(
            "disk", "fail", f"{text}; at least {gibibytes(MIN_DISK_BYTES)} is needed", fix, data
        )
    if free < EASY_DISK_BYTES:
        fix = "make room, or set state: /a/larger/disk in the peer file"
        return CheckResult("disk", "warn", f"{text}; a stage of a large model takes more", fix, data)
    return CheckResult("disk", "ok", text, data=data)


def open_files() -> CheckResult:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES:
        text = "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard} open files"
        return CheckResult("files", "ok", text, data={"limit": hard})
    text = f"up to {hard} open files; a peer with many neighbours takes {OPEN_FILES}"
    fix = f"sudo prlimit --pid $$ --nofile={OPEN_FILES}:{OPEN_FILES}   (systemd: LimitNOFILE={OPEN_FILES})"
    return CheckResult("files", "warn", text, fix, {"limit": hard})


def port(config: PeerFile, running: bool) -> CheckResult:
    """Return whether p2pd could listen at the peer file's addresses."""
    listen, data = ", ".join(config.listen), {"listen": list(config.listen)}
    if running:
        return CheckResult("port", "ok", f"this peer is running and listens at {listen}", data=data)
    try:
        check_ports(config.listen)
    except CannotStart as error:
        return CheckResult("port", "fail", str(error), "sudo ss -ltnp   shows who listens where", data)
    return CheckResult("port", "ok", f"{listen} can be listened at", data=data)


def metrics(config: PeerFile, running: bool) -> CheckResult:
    """Return whether the metrics could be served at the peer file's address."""
    address = config.metrics.address
    if address is None:
        return CheckResult("metrics", "ok", "off")
    text, data = f"{config.metrics.listen}", {"listen": config.metrics.listen}
    if running:
        return CheckResult("metrics", "ok", f"served by the running peer at {text}", data=data)
    host, number = address
    why = _refused(host, number)
    if not why:
        return CheckResult("metrics", "ok", f"{text} is free", data=data)
    for other in config.metrics.other_ports:
        if not _refused(host, other):
            return CheckResult(
                "metrics", "ok", f"{number} is taken; a peer that starts now uses {other}", data=data
            )
    fix = "metrics: {listen: 127.0.0.1:0} in the peer file (any free port)"
    return CheckResult("metrics", "fail", f"{text}: {why}", fix, data)


def _refused(host: str, port: int) -> str:
    """Return why the port cannot be bound; empty: it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def second_opinion(able: bool, is_bootstrap: bool) -> CheckResult:
    """Return whether py-libp2p is installed. Only a bootstrap needs it, to dial other peers back."""
    if able:
        version = importlib.metadata.version("libp2p")
        return CheckResult(
            "libp2p",
            "ok",
            f"py-libp2p {version}, to cross-check dials and to dial others back",
            data={"version": version},
        )
    if not is_bootstrap:
        return CheckResult("libp2p", "ok", "py-libp2p is not installed; only a bootstrap needs it")
    text = "py-libp2p is not installed: this peer cannot cross-check dials or dial others back"
    compiler = "sudo apt install build-essential python3-dev libgmp-dev"
    fix = f"{compiler}; then {how_to_install('libp2p')}"
    return CheckResult("libp2p", "warn", text, fix)
