"""Check the target folder of an export. This module does not import torch, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from peers.config.atomic_files import is_file, is_folder, is_there

INDEX = "model.safetensors.index.json"


class ExportError(ValueError):
    """The export folder cannot be written or read. The message is one line with the reason."""


def require_replaceable(folder: Path, replace: bool) -> None:
    """Raise ExportError unless the folder is an export or empty. A mistyped name must not cost an archive or
    a peer's key."""
    if not is_there(folder):
        return
    if not replace:
        raise ExportError(f"{folder} exists already: name another folder or add --replace")
    if not is_folder(folder):
        raise ExportError(f"{folder} is no folder: name another one")
    if not is_file(folder / INDEX) and any(folder.iterdir()):
        raise ExportError(f"{folder} holds no exported model, so it is not replaced: name another folder")
