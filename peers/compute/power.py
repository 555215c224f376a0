"""Whether this machine runs on its battery, by what the system says."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

SUPPLIES = Path("/sys/class/power_supply")
"""Linux: a folder for each battery and each plug (Documentation/ABI/testing/sysfs-class-power)."""


def on_battery(supplies: Path = SUPPLIES) -> bool | None:
    """None: it has no battery, or the system does not tell."""
    if sys.platform != "linux":
        known = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        return not known.power_plugged if known is not None and known.power_plugged is not None else None
    kinds: dict[str, list[Path]] = {}
    for supply in sorted(supplies.glob("*")):
        if _said(supply, "scope") != "Device":  # A mouse's battery is not this machine's.
            kinds.setdefault(_said(supply, "type"), []).append(supply)
    if not kinds.get("Battery"):
        return None
    plugs = [_said(supply, "online") for kind in ("Mains", "USB") for supply in kinds.get(kind, ())]
    if any(plug not in ("", "0") for plug in plugs):
        return False
    if "0" in plugs:
        return True
    # No plug is told of, as on some tablets: a battery that is being emptied is in use.
    return any(_said(supply, "status") == "Discharging" for supply in kinds["Battery"])


def _said(supply: Path, what: str) -> str:
    """Empty: nothing; drivers also refuse to be read now and then."""
    try:
        return (supply / what).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
