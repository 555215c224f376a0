"""Check what surrounds a peer: a container, WSL2, and settings that put the computer to sleep."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from peers.tools.doctor.line import CheckResult

ANSWER_SECONDS = 5.0
"""Time limit for a program of the system; Windows starts one from WSL2 within a second."""
AWAKE_ON_WINDOWS = "powercfg.exe /change standby-timeout-ac 0   (also in PowerShell)"
AWAKE_ON_GNOME = "gsettings set org.gnome.settings-daemon.plugins.power sleep-inactive-ac-type nothing"
MIRRORED = (
    "write networkingMode=mirrored below [wsl2] in %UserProfile%\\.wslconfig, then in PowerShell: "
    "wsl --shutdown   (docs/install.md)"
)
GNOME_SLEEPS = ("suspend", "hibernate", "shutdown", "logout")
"""GNOME's actions that end or stop a program."""
GNOME_POWER = ("gsettings", "get", "org.gnome.settings-daemon.plugins.power")

Ask = Callable[..., str]
"""Runs a program and returns its output; empty if it is missing, fails or takes too long."""


@dataclass(frozen=True, slots=True)
class Host:
    """The surroundings of this process."""

    container: str = ""
    """Program that runs the container, or `container`; empty: no container."""
    is_wsl: bool = False
    networking: str = ""
    """Networking mode of WSL2, such as `nat` or `mirrored`; empty: unknown."""


def ask_system(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def look(root: Path = Path("/"), environment: Mapping[str, str] = os.environ, ask: Ask = ask_system) -> Host:
    """Return where this process runs, by files below `root`, the environment and WSL2's own program."""
    container = environment.get("container", "")  # Set by podman and systemd-nspawn.
    if (root / ".dockerenv").exists():
        container = "docker"
    elif "KUBERNETES_SERVICE_HOST" in environment:
        container = "kubernetes"
    elif (root / "run" / ".containerenv").exists():
        container = container or "podman"
    try:
        kernel = (root / "proc" / "sys" / "kernel" / "osrelease").read_text().lower()
    except OSError:
        kernel = ""
    is_wsl = "microsoft" in kernel
    return Host(container, is_wsl, ask("wslinfo", "--networking-mode") if is_wsl and not container else "")


def system(host: Host) -> CheckResult:
    """Return what stands between the peer's port and other computers."""
    data = {"container": host.container, "wsl": host.is_wsl, "networking": host.networking}
    if host.container:
        text = f"in a container ({host.container}): others reach only ports that it publishes"
        return CheckResult("system", "ok", f"{text} (docker run --network host: all)", data=data)
    if not host.is_wsl:
        return CheckResult("system", "ok", "no container, no WSL2", data=data)
    if host.networking == "wsl1":
        fix = "in PowerShell: wsl --set-version DISTRIBUTION 2"
        return CheckResult("system", "warn", "in WSL 1, which has no GPU and was not tested", fix, data)
    if host.networking == "mirrored":
        text = "in WSL2 with mirrored networking: a port must also be open in Windows (docs/install.md)"
        return CheckResult("system", "ok", text, data=data)
    text = f"in WSL2 with {host.networking or 'unknown'} networking: others cannot dial this peer"
    return CheckResult("system", "warn", text, MIRRORED, data)


def sleep(host: Host, ask: Ask = ask_system) -> CheckResult:
    """Return whether the computer falls asleep while nobody uses it, which would end the peer's work."""
    if host.container:
        return CheckResult("sleep", "ok", "decided by the computer that runs this container")
    if host.is_wsl:
        return _judge_sleep(_windows_seconds(ask), "Windows", AWAKE_ON_WINDOWS)
    if ask("systemctl", "show", "--property=LoadState", "--value", "sleep.target") == "masked":
        return CheckResult("sleep", "ok", "turned off (systemd's sleep.target is masked)")
    kind = ask(*GNOME_POWER, "sleep-inactive-ac-type").strip("'")
    seconds = ask(*GNOME_POWER, "sleep-inactive-ac-timeout")
    if not (kind and seconds.isdecimal()):
        return CheckResult("sleep", "ok", "not known: keep this computer awake while the peer runs")
    return _judge_sleep(int(seconds) if kind in GNOME_SLEEPS else 0, "GNOME", AWAKE_ON_GNOME)


def _windows_seconds(ask: Ask) -> int | None:
    """Return after how many seconds Windows sleeps while plugged in; 0: never; None: unknown. The names in
    powercfg's output are translated, but its last two numbers are always those for mains and for battery."""
    output = ask("powercfg.exe", "/query", "SCHEME_CURRENT", "SUB_SLEEP", "STANDBYIDLE")
    numbers = re.findall(r"\b0x([0-9a-f]{8})\b", output)
    return int(numbers[-2], 16) if len(numbers) >= 2 else None


def _judge_sleep(seconds: int | None, system_name: str, fix: str) -> CheckResult:
    if seconds is None:
        text = f"not known: {system_name} did not answer; keep this computer awake while the peer runs"
        return CheckResult("sleep", "ok", text)
    data = {"seconds": seconds}
    if not seconds:
        return CheckResult("sleep", "ok", f"{system_name} stays awake while plugged in", data=data)
    text = f"{system_name} sleeps after {seconds / 60:.0f} minutes without input, and the peer with it"
    return CheckResult("sleep", "warn", text, fix, data)
