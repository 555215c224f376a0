"""What the benches of this folder found, for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from peers.config.atomic_files import write_atomically

Play = TypeVar("Play")


def kept(plays: Iterable[Play], into: list[Play]) -> Iterator[Play]:
    """As they come."""
    for play in plays:
        into.append(play)
        yield play


def write(file: Path | None, plays: Sequence[object]) -> None:
    """Dataclasses, as JSON. None: nobody asked for it."""
    if file is not None:
        write_atomically(file, msgspec.json.format(msgspec.json.encode(plays), indent=1))
