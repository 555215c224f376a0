"""What people write about a swarm that does not exist yet: how many peers, how fast, on which lines.

`9000x500tps@100/20,1000x20000tps@1000/1000`: nine thousand peers that would train 500 tokens per second if
each held the whole model, on lines of 100 Mbit/s down and 20 up; a thousand fast ones. Without `@` a line of
100/40, or of its region: `9000x500tps:eu,1000x20ktps@1000/1000:us` (links.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MEGABIT = 1e6 / 8
Line = tuple[float, float]
DEFAULT_LINE: Line = (100.0, 40.0)
"""Mbit/s down and up: a usual VDSL or cable line."""
_PART = re.compile(
    r"(?P<count>\d+)(?:x(?P<speed>\d+(?:\.\d+)?)(?P<unit>k?)tps)?"
    r"(?:@(?P<down>\d+(?:\.\d+)?)/(?P<up>\d+(?:\.\d+)?))?"
    r"(?::(?P<region>[^\s:@,]+))?"
)


@dataclass(frozen=True, slots=True)
class PeerClass:
    """Peers that are alike."""

    count: int
    tokens_per_second: float | None
    """Of the whole model, forward and backward, by one of them alone; None: as fast as this machine."""
    down: float
    """Bytes per second."""
    up: float
    region: str = ""


def peer_classes(text: str, lines: Mapping[str, Line] | None = None) -> tuple[PeerClass, ...]:
    """The classes in `text`, as above. `lines`: of the regions, where there are any. Raises ValueError."""
    found = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is no class of peers; expected for instance 8x200tps or 1000x2ktps@100/40 "
                "(count, tokens per second of the whole model, Mbit/s down/up)"
            )
        region = match["region"] or ""
        _check(part.strip(), region, lines)
        line = (lines or {}).get(region, DEFAULT_LINE)
        speed = float(match["speed"]) * (1000 if match["unit"] else 1) if match["speed"] else None
        down, up = (
            float(match[key] or usual) for key, usual in zip(("down", "up"), line, strict=True)
        )
        if int(match["count"]) < 1 or speed == 0 or not down or not up:
            raise ValueError(f"{part.strip()!r}: counts and speeds must be more than nothing")
        found.append(PeerClass(int(match["count"]), speed, down * MEGABIT, up * MEGABIT, region))
    return tuple(found)


def _check(part: str, region: str, lines: Mapping[str, Line] | None) -> None:
    if lines is None and region:
        raise ValueError(f"{part!r}: regions are those of a table of links; name it with --links")
    if lines is not None and region not in lines:
        raise ValueError(f"{part!r}: which region of the table? it has {', '.join(sorted(lines))}")
