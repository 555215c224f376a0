"""What a line that loses packets leaves a link between two peers.

Congestion control that takes loss for a full line (Reno, and CUBIC, which does as Reno does where that is
faster, RFC 9438 section 4.3: at a loss of 1 % up to round trips of a quarter of a second) sends
MSS / RTT * C / sqrt(loss) on the mean (Mathis, Semke, Mahdavi and Ott 1997, "The macroscopic behavior of the
TCP congestion avoidance algorithm"). What a lost packet held comes a round trip later.

Sizes in bytes, times in seconds, losses as shares of packets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf, sqrt

SEGMENT_BYTES = 1448
"""Of a packet of 1,500 bytes with time stamps."""
MATHIS = sqrt(3 / 4)
"""C where receivers acknowledge every other packet, as they do. Bodies both ways on one connection go as fast
as that says, 2.0 Mbit/s at 50 ms and 1 %; 4 MB one way at 2.8, as with C = sqrt(3 / 2)
(docs/benchmarks/wan.md)."""
STREAMS = 3
"""Of a link that is slow: its own and two subflows (docs/decisions/0011-subflows.md)."""


def of_both(one: float, other: float) -> float:
    """What is lost of packets that cross both lines."""
    return 1.0 - (1.0 - one) * (1.0 - other)


def carries(loss: float, round_trip: float) -> float:
    """Bytes per second of one connection."""
    return SEGMENT_BYTES / round_trip * MATHIS / sqrt(loss) if loss and round_trip else inf


def repeated(loss: float, round_trip: float, size: int) -> float:
    """Seconds that a body is later on the mean because some of its packets are sent again, all at once."""
    return round_trip * (1.0 - (1.0 - loss) ** ceil(size / SEGMENT_BYTES))


@dataclass(slots=True)
class Streams:
    """One direction of a link, whose bodies go whole over the stream that is free first."""

    rate: float
    """Bytes per second of each."""
    repeats: float
    """Seconds that a body is later."""
    free: list[float] = field(default_factory=lambda: [0.0] * STREAMS)
    """When each is through with what it was given."""

    def through(self, begins: float, size: int) -> float:
        """When a body is on its way that could begin then."""
        first = min(range(len(self.free)), key=self.free.__getitem__)
        self.free[first] = max(begins, self.free[first]) + size / self.rate
        return self.free[first] + self.repeats
