"""What people write about a swarm that does not exist yet: how many peers, how fast, on which lines.

`9000x500tps@100/20,1000x20000tps@1000/1000`: nine thousand peers that would train 500 tokens per second if
each held the whole model, on lines of 100 Mbit/s down and 20 up; a thousand fast ones. Without `@` a line of
100/40, or of its region: `9000x500tps:eu,1000x20ktps@1000/1000:us` (links.py). What each has of memory for
this stands after a colon as well: `8x2ktps@100/40:24GB`, `8x2ktps:24GB:eu`. Whatever is a number with GB or
GiB is no region. `@100/10/0.5%` is a line that loses every two hundredth of the packets that cross it
(losses.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MEGABIT = 1e6 / 8
Line = tuple[float, float]
DEFAULT_LINE: Line = (100.0, 40.0)
"""Mbit/s down and up: a usual VDSL or cable line."""
MAX_LOST = 0.1
"""Of packets. Connections then wait for their timers, and the formula for them does not hold."""
UNITS = {"GB": 10**9, "GiB": 1 << 30}
_PART = re.compile(
    r"(?P<count>\d+)x(?P<speed>\d+(?:\.\d+)?)(?P<unit>k?)tps"
    r"(?:@(?P<down>\d+(?:\.\d+)?)/(?P<up>\d+(?:\.\d+)?)(?:/(?P<loss>\d+(?:\.\d+)?)%)?)?"
    r"(?::(?P<memory>\d+(?:\.\d+)?)(?P<bytes>GB|GiB))?"
    r"(?::(?P<region>(?!\d+(?:\.\d+)?(?:GB|GiB)$)[^\s:@,*]+))?"
)


@dataclass(frozen=True, slots=True)
class PeerClass:
    """Peers that are alike."""

    count: int
    tokens_per_second: float
    """Of the whole model, forward and backward, by one of them alone."""
    down: float
    """Bytes per second."""
    up: float
    region: str = ""
    memory: int = 0
    """Bytes that each has for this; 0: not said, and not looked at."""
    loss: float = 0.0
    """Share of the packets that cross its line."""

    def __str__(self) -> str:
        """Which peers are meant, for people."""
        memory = f" with {self.memory / 1e9:.3g} GB" if self.memory else ""
        peers = f"{self.count:,} {'peer' if self.count == 1 else 'peers'}"
        return f"{peers} of {self.tokens_per_second:,.0f} tokens/s{memory}"


def peer_classes(text: str, lines: Mapping[str, Line] | None = None) -> tuple[PeerClass, ...]:
    """The classes in `text`, as above. `lines`: of the regions, where there are any. Raises ValueError."""
    found = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is no class of peers; expected for instance 8x200tps or 1000x2ktps@100/40 "
                "or 8x2ktps@100/40:24GB (count, tokens per second of the whole model, Mbit/s down/up, memory)"
            )
        region = match["region"] or ""
        _check(part.strip(), region, lines)
        line = (lines or {}).get(region, DEFAULT_LINE)
        speed = float(match["speed"]) * (1000 if match["unit"] else 1)
        down, up = (float(match[key] or usual) for key, usual in zip(("down", "up"), line, strict=True))
        memory = int(float(match["memory"]) * UNITS[match["bytes"]]) if match["memory"] else None
        if int(match["count"]) < 1 or speed == 0 or not down or not up or memory == 0:
            raise ValueError(f"{part.strip()!r}: counts and speeds must be more than nothing")
        lines_of_it = down * MEGABIT, up * MEGABIT
        loss = float(match["loss"] or 0.0) / 100
        if loss >= MAX_LOST:
            raise ValueError(f"{part.strip()!r}: lines that lose {MAX_LOST:.0%} and more are not foretold")
        found.append(PeerClass(int(match["count"]), speed, *lines_of_it, region, memory or 0, loss))
    return tuple(found)


def _check(part: str, region: str, lines: Mapping[str, Line] | None) -> None:
    if lines is None and region:
        raise ValueError(f"{part!r}: regions are those of a table of links; name it with --links")
    if lines is not None and region not in lines:
        raise ValueError(f"{part!r}: which region of the table? it has {', '.join(sorted(lines))}")
