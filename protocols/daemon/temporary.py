"""Temporary folders: named for the process that uses them, so that what a killed one left can be told."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def prefix(kind: str = "") -> str:
    """How the name of a temporary folder of this process begins."""
    return f"swarmnet-{os.getpid()}-" + (f"{kind}-" if kind else "")


def folders() -> list[Path]:
    """All of this program in the system's temporary folder. No link is one."""
    found = Path(tempfile.gettempdir()).glob("swarmnet-*-*")
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def is_used(folder: Path) -> bool | None:
    """Whether the process that it is named for runs; None: it is named for none."""
    pid = folder.name.split("-")[1]
    return _runs(int(pid)) if pid.isdigit() else None


def remove_stale() -> None:
    """What processes that were killed left behind."""
    for folder in folders():
        if is_used(folder) is False:
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
