"""What one microbatch calls on its way: a trace of the product's functions, by file.

    steps = trace_of_a_microbatch(...)          # in a story of tests/support/swarm.py

A step is one call of a function of swarmnet/, protocols/ or peers/, in the order of the calls, with the file
that calls it before. Comprehensions and lambdas count as the function that they stand in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("swarmnet", "protocols", "peers")


@dataclass(slots=True)
class Walk:
    """Calls in the order in which they were made, as (file below the root, function)."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    @property
    def changes(self) -> int:
        """How often a call is in another file than the call before."""
        return sum(here[0] != there[0] for here, there in zip(self.calls, self.calls[1:], strict=False))

    def into(self, *words: str) -> list[tuple[str, str]]:
        """Calls into files whose path has one of these words in it."""
        return [call for call in self.calls if any(word in call[0] for word in words)]


def _product_file(name: str, known: dict[str, str | None]) -> str | None:
    if name not in known:
        path = Path(name)
        inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
        known[name] = str(path.relative_to(ROOT)) if inside else None
    return known[name]


@contextmanager
def walking(starts: Callable[[str, str], bool]) -> Iterator[Walk]:
    """Record what is called in this thread, from the first call for which `starts(file, function)` holds."""
    walk, known, begun = Walk(), dict[str, str | None](), False

    def called(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal begun
        if event != "call":
            return
        file, function = _product_file(frame.f_code.co_filename, known), frame.f_code.co_name
        if file is None or function.startswith("<"):
            return
        begun = begun or starts(file, function)
        if begun:
            walk.calls.append((file, function))

    sys.setprofile(called)
    try:
        yield walk
    finally:
        sys.setprofile(None)
