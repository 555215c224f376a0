"""Read from the operating system whether this machine runs on its battery."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

SUPPLIES = Path("/sys/class/power_supply")
"""Linux: a folder for each battery and each plug (Documentation/ABI/testing/sysfs-class-power)."""


def on_battery(supplies: Path = SUPPLIES) -> bool | None:
    """Return whether the machine runs on its battery; None without a battery or if it is unknown."""
    if sys.platform != "linux":
        known = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        return not known.power_plugged if known is not None and known.power_plugged is not None else None
    kinds: dict[str, list[Path]] = {}
    for supply in sorted(supplies.glob("*")):
        if _read(supply, "scope") != "Device":  # The battery of a mouse is not this machine's.
            kinds.setdefault(_read(supply, "type"), []).append(supply)
    if not kinds.get("Battery"):
        return None
    plugs = [_read(supply, "online") for kind in ("Mains", "USB") for supply in kinds.get(kind, ())]
    if any(plug not in ("", "0") for plug in plugs):
        return False
    if "0" in plugs:
        return True
    # Some tablets report no plug; then a battery that discharges is in use.
    return any(_read(supply, "status") == "Discharging" for supply in kinds["Battery"])


def _read(supply: Path, what: str) -> str:
    """Return the text of one value; empty if there is none or the driver refuses to read it."""
    try:
        return (supply / what).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
