"""The folder that an export writes, and what must not stand there before; without the seconds of torch."""

from __future__ import annotations

from pathlib import Path

from peers.config.atomic_files import is_file, is_folder, is_there

INDEX = "model.safetensors.index.json"


class ExportError(ValueError):
    """The folder cannot be written or read; one line that says why."""


def require_replaceable(folder: Path, replace: bool) -> None:
    """Only an export, or an empty folder, is ever replaced: a wrong name must not cost an archive, or a
    peer's key. Raises ExportError where something else is there."""
    if not is_there(folder):
        return
    if not replace:
        raise ExportError(f"{folder} exists already: name another folder or add --replace")
    if not is_folder(folder):
        raise ExportError(f"{folder} is no folder: name another one")
    if not is_file(folder / INDEX) and any(folder.iterdir()):
        raise ExportError(f"{folder} holds no exported model, so it is not replaced: name another folder")
