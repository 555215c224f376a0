"""What people write about a swarm that does not exist yet: how many peers, how fast, on which lines.

`9000x500tps@100/20,1000x20000tps@1000/1000`: nine thousand peers that would train 500 tokens per second if
each held the whole model, on lines of 100 Mbit/s down and 20 up; a thousand fast ones. Without `@` a line of
100/40.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MEGABIT = 1e6 / 8
DEFAULT_LINE = (100.0, 40.0)
"""Mbit/s down and up: a usual VDSL or cable line."""
_PART = re.compile(
    r"(?P<count>\d+)(?:x(?P<speed>\d+(?:\.\d+)?)(?P<unit>k?)tps)?"
    r"(?:@(?P<down>\d+(?:\.\d+)?)/(?P<up>\d+(?:\.\d+)?))?"
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


def peer_classes(text: str) -> tuple[PeerClass, ...]:
    """The classes in `text`, as above. Raises ValueError."""
    found = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is no class of peers; expected for instance 8x200tps or 1000x2ktps@100/40 "
                "(count, tokens per second of the whole model, Mbit/s down/up)"
            )
        speed = float(match["speed"]) * (1000 if match["unit"] else 1) if match["speed"] else None
        down, up = (
            float(match[key] or usual) for key, usual in zip(("down", "up"), DEFAULT_LINE, strict=True)
        )
        if int(match["count"]) < 1 or speed == 0 or not down or not up:
            raise ValueError(f"{part.strip()!r}: counts and speeds must be more than nothing")
        found.append(PeerClass(int(match["count"]), speed, down * MEGABIT, up * MEGABIT))
    return tuple(found)
