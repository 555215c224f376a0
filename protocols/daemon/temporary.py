"""Find and remove temporary folders that killed processes left. The folders' names contain the process id."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def prefix(kind: str = "") -> str:
    """Return the prefix for names of this process's temporary folders."""
    return f"swarmnet-{os.getpid()}-" + (f"{kind}-" if kind else "")


def folders() -> list[Path]:
    """Return all of this program's folders in the system's temporary folder. Symbolic links are left out."""
    paths = Path(tempfile.gettempdir()).glob("swarmnet-*-*")
    return sorted(path for path in paths if path.is_dir() and not path.is_symlink())


def is_used(folder: Path) -> bool | None:
    """Return True if the process in the folder's name runs; None if the name contains no process id."""
    pid = folder.name.split("-")[1]
    return _process_runs(int(pid)) if pid.isdigit() else None


def remove_stale() -> None:
    """Remove the folders of processes that no longer run."""
    for folder in folders():
        if is_used(folder) is False:
            shutil.rmtree(folder, ignore_errors=True)


def _process_runs(pid: int) -> bool:
    """Return False if there is no process with this id. In doubt, return True: its folder is then kept."""
    try:
        os.kill(pid, 0)  # Signal 0 only checks whether the process exists.
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
