"""Read from the operating system whether this machine runs on its battery."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

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
