"""Pause a peer outside its working hours, on battery, and while other programs use the machine."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, Protocol

import psutil

from peers.compute.machine_use import GpuUse, NoGpu, OtherUse
from peers.config.limits import LimitsFile
from swarmnet.resources.idleness import Idleness, Steady
from swarmnet.resources.working_hours import Hours

Why = Literal["user", "schedule", "idle", "battery", "traffic"]
"""Reason why a worker is paused; `peers/worker/pause/pausing.py` has the texts for users."""
LOOK_SECONDS = 1.0
PLUG_SECONDS = 10.0
"""A loose or briefly moved plug does not pause a peer."""
SUPPLIES = Path("/sys/class/power_supply")
"""Linux: a folder for each battery and each plug (Documentation/ABI/testing/sysfs-class-power)."""


def on_battery(supplies: Path = SUPPLIES) -> bool | None:
    """Return whether the machine runs on its battery; None without a battery or if it is unknown. On Linux,
    `supplies` is the folder with one folder for each power supply, whose files are its attributes."""
    if sys.platform != "linux":
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        if battery is None or battery.power_plugged is None:
            return None
        return not battery.power_plugged
    supplies_by_type: dict[str, list[Path]] = {}
    for supply in sorted(supplies.glob("*")):
        if _read(supply, "scope") != "Device":  # The battery of a mouse is not this machine's.
            supplies_by_type.setdefault(_read(supply, "type"), []).append(supply)
    if not supplies_by_type.get("Battery"):
        return None
    plugs = [*supplies_by_type.get("Mains", ()), *supplies_by_type.get("USB", ())]
    plug_values = [_read(plug, "online") for plug in plugs]
    if any(value not in ("", "0") for value in plug_values):  # Empty if a plug has no such file.
        return False
    if "0" in plug_values:
        return True
    # Some tablets report no plug; then a battery that discharges is in use.
    return any(_read(supply, "status") == "Discharging" for supply in supplies_by_type["Battery"])


def _read(supply: Path, what: str) -> str:
    """Return the text of one value; empty if there is none or the driver refuses to read it."""
    try:
        return (supply / what).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


class Pauses(Protocol):
    """The worker role, which can be paused."""

    def pause(self, reason: Why, text: str = "") -> None: ...

    def resume(self, reason: Why) -> None: ...


class LimitsWatch:
    """Watches the limits. Call `look` once before the peer starts, then `run`."""

    def __init__(
        self,
        *,
        limits: LimitsFile,
        duty_cycle: float = 1.0,
        role: Pauses,
        others: OtherUse | None = None,
        gpu: GpuUse | None = None,
        idleness: Idleness | None = None,
        battery: Callable[[], bool | None] = on_battery,
        month_bytes: Callable[[], int] = lambda: 0,
        share_changed: Callable[[float], None] = lambda share: None,
    ) -> None:
        """`duty_cycle` is the largest fraction of the time to compute. `month_bytes` returns the bytes sent
        and received in this calendar month. `share_changed` is called when `share` has changed."""
        self.limits = limits
        self.role = role
        self.month_bytes = month_bytes
        self.duty_cycle = duty_cycle
        self.share = duty_cycle
        """Fraction of the time to compute now."""
        self._share_changed = share_changed
        self.battery = battery
        self.unplugged = Steady(PLUG_SECONDS)
        self.others = others if others is not None else OtherUse()
        self.gpu: GpuUse = gpu if gpu is not None else NoGpu()
        self.idleness = idleness if idleness is not None else Idleness()

    def change(self, limits: LimitsFile, duty_cycle: float = 1.0) -> None:
        """Follow other limits from now on. A pause by a limit that no longer exists ends."""
        self.limits = limits
        self.duty_cycle = duty_cycle
        reasons: dict[Why, object] = {
            "schedule": limits.hours,
            "traffic": limits.traffic_per_month,
            "battery": limits.only_when_plugged_in,
            "idle": limits.only_when_idle,
        }
        for reason, limit in reasons.items():
            if not limit:
                self.role.resume(reason)
        self._set_share(is_idle=self.idleness.idle or not limits.only_when_idle)

    async def run(self, own: Callable[[], Collection[int]]) -> None:
        """Check until cancelled. `own` returns the ids of other processes that work for this peer."""
        loop = asyncio.get_running_loop()
        while True:
            wall = time.localtime()
            self.look(wall.tm_hour * 60 + wall.tm_min, loop.time(), own())
            await asyncio.sleep(LOOK_SECONDS)

    def look(self, minute: int, now: float, own: Collection[int] = ()) -> None:
        """Check each limit once, and pause or resume the worker accordingly. `minute` is the local time of
        day. `now` is in seconds of a monotonic clock. `own` are ids of this peer's other processes. Battery
        and use by others count only after they have lasted for some seconds (`look` of each)."""
        hours, most_bytes = self.limits.when, self.limits.traffic_per_month
        if hours is not None:
            if hours.allow(minute):
                self.role.resume("schedule")
            else:
                self.role.pause("schedule", _describe_wait(hours, minute))
        if most_bytes is not None:
            if self.month_bytes() < most_bytes:
                self.role.resume("traffic")
            else:
                self.role.pause("traffic")
        if self.limits.only_when_plugged_in:
            if self.unplugged.look(bool(self.battery()), now):
                self.role.pause("battery")
            else:
                self.role.resume("battery")
        if self.limits.only_when_idle:
            cores, gpu = self.others.cores(own), self.gpu.share()
            is_idle = self.idleness.look(cores, gpu, now)
            self._set_share(is_idle)
            if is_idle or self.limits.share_when_busy:
                self.role.resume("idle")
            else:
                used = f"{cores:.1f} cores" + (f", {gpu:.0%} of the GPU" if gpu is not None else "")
                self.role.pause("idle", f"other programs use this machine ({used} just now)")

    def _set_share(self, is_idle: bool) -> None:
        """Set the fraction of the time to compute. A peer that is to pause instead needs none."""
        share = self.duty_cycle if is_idle else min(self.duty_cycle, self.limits.share_when_busy or 1.0)
        if share != self.share:
            self.share = share
            self._share_changed(share)


def _describe_wait(hours: Hours, minute: int) -> str:
    """Return a text for people with the time of day at which the hours begin."""
    wait = hours.until(minute)
    at = (minute + wait) % (24 * 60)
    return f"outside its hours until {at // 60:02}:{at % 60:02}"
