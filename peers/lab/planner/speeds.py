"""Parse a description of a planned swarm: numbers of peers, their speeds, links and memory.

`9000x500tps@100/20,1000x20000tps@1000/1000` describes 9,000 peers that would each train 500 tokens per second
with the whole model, on links of 100 Mbit/s down and 20 up, and 1,000 fast peers. Without `@` a link has
100/40, or the speed of its region: `9000x500tps:eu,1000x20ktps@1000/1000:us` (planned_links.py). The memory
of each peer also follows a colon: `8x2ktps@100/40:24GB`, `8x2ktps:24GB:eu`. A number with GB or GiB is
always memory.
`@100/10/0.5%` is a link that loses every two hundredth packet (losses.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MEGABIT = 1e6 / 8
Line = tuple[float, float]
DEFAULT_LINE: Line = (100.0, 40.0)
"""Mbit/s down and up: a usual VDSL or cable link."""
MAX_LOST = 0.1
"""Maximum share of lost packets; above it retransmission timers dominate, and the formula does not hold."""
UNITS = {"GB": 10**9, "GiB": 1 << 30}
_PART = re.compile(
    r"(?P<count>\d+)x(?P<speed>\d+(?:\.\d+)?)(?P<unit>k?)tps"
    r"(?:@(?P<down>\d+(?:\.\d+)?)/(?P<up>\d+(?:\.\d+)?)(?:/(?P<loss>\d+(?:\.\d+)?)%)?)?"
    r"(?::(?P<memory>\d+(?:\.\d+)?)(?P<bytes>GB|GiB))?"
    r"(?::(?P<region>(?!\d+(?:\.\d+)?(?:GB|GiB)$)[^\s:@,*]+))?"
)


@dataclass(frozen=True, slots=True)
class PeerClass:
    """A number of peers with equal speed, link and memory."""

    count: int
    tokens_per_second: float
    """Speed of one peer with the whole model, forward and backward."""
    down: float
    """Download speed in bytes per second."""
    up: float
    region: str = ""
    memory: int = 0
    """Bytes of memory of each peer; 0: unknown, and not checked."""
    loss: float = 0.0
    """Share of the packets that a peer's link loses."""

    def __str__(self) -> str:
        """Return a description of the peers for messages."""
        memory = f" with {self.memory / 1e9:.3g} GB" if self.memory else ""
        peers = f"{self.count:,} {'peer' if self.count == 1 else 'peers'}"
        return f"{peers} of {self.tokens_per_second:,.0f} tokens/s{memory}"


def peer_classes(text: str, lines: Mapping[str, Line] | None = None) -> tuple[PeerClass, ...]:
    """Parse the peer classes in `text`. `lines`: link speeds by region. Raises ValueError."""
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
            raise ValueError(f"{part.strip()!r}: links that lose {MAX_LOST:.0%} and more cannot be predicted")
        found.append(PeerClass(int(match["count"]), speed, *lines_of_it, region, memory or 0, loss))
    return tuple(found)


def _check(part: str, region: str, lines: Mapping[str, Line] | None) -> None:
    if lines is None and region:
        raise ValueError(f"{part!r}: regions are those of a table of links; name it with --links")
    if lines is not None and region not in lines:
        raise ValueError(f"{part!r}: which region of the table? it has {', '.join(sorted(lines))}")
