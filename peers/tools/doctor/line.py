"""One line of what the doctor says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warn", "fail"]
Check = Literal[
    "python", "torch", "gpu", "memory", "disk", "files", "port", "metrics", "libp2p", "p2pd", "bootstrap",
    "clock", "run", "stage", "text", "bandwidth", "reachability",
]  # fmt: skip
"""Everything that is looked at, in this order."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """fail: a peer cannot work so. warn: it can, but worse."""

    check: Check
    level: Level
    text: str
    fix: str = ""
    """What to do: a command or a key of the peer file, with the real value in it."""
    data: Mapping[str, object] = field(default_factory=dict)
    """The same for programs (`--json`), units in the names."""


Tell = Callable[[CheckResult], None]


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
