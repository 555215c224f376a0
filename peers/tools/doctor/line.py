"""The result of one check of the doctor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warn", "fail"]
Check = Literal[
    "python",
    "system",
    "sleep",
    "torch",
    "gpu",
    "memory",
    "disk",
    "files",
    "port",
    "metrics",
    "libp2p",
    "p2pd",
    "bootstrap",
    "clock",
    "run",
    "stage",
    "text",
    "bandwidth",
    "reachability",
]
"""All checks, in the order in which they run."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check. `fail`: a peer cannot work. `warn`: it works, but worse."""

    check: Check
    level: Level
    text: str
    fix: str = ""
    """What to do: a command or a key of the peer file, with its real value."""
    data: Mapping[str, object] = field(default_factory=dict)
    """The same facts for programs (`--json`), with units in the names."""


Tell = Callable[[CheckResult], None]


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
