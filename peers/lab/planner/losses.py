"""Speed of a connection between two peers whose links lose packets.

Loss-based congestion control treats loss as congestion. It sends MSS / RTT * C / sqrt(loss) on the mean
(Mathis, Semke, Mahdavi and Ott 1997, "The macroscopic behavior of the TCP congestion avoidance algorithm").
This holds for Reno, and for CUBIC where Reno is faster (RFC 9438 section 4.3): at a loss of 1 % up to round
trips of a quarter of a second. The data of a lost packet arrives a round trip later.

Sizes in bytes, times in seconds, losses as shares of packets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf, sqrt

SEGMENT_BYTES = 1448
"""Payload bytes of a packet of 1,500 bytes with time stamps."""
MATHIS = sqrt(3 / 4)
"""The formula's C if receivers acknowledge every other packet, as is usual.

It fits bodies in both directions on one connection: 2.0 Mbit/s at 50 ms and 1 %. For 4 MB in one direction
2.8 Mbit/s were measured, which fits C = sqrt(3 / 2) (docs/benchmarks/wan.md)."""
STREAMS = 3
"""Connections of a slow link: its own and two subflows (docs/decisions/0011-subflows.md)."""


def of_both(one: float, other: float) -> float:
    """Return the share of packets that are lost on the way through both links."""
    return 1.0 - (1.0 - one) * (1.0 - other)


def carries(loss: float, round_trip: float) -> float:
    """Return the bytes per second of one connection; infinite without loss or latency."""
    return SEGMENT_BYTES / round_trip * MATHIS / sqrt(loss) if loss and round_trip else inf


def repeated(loss: float, round_trip: float, size: int) -> float:
    """Return the mean delay of a body in seconds, if its lost packets are sent again in one round trip."""
    return round_trip * (1.0 - (1.0 - loss) ** ceil(size / SEGMENT_BYTES))


@dataclass(slots=True)
class Streams:
    """One direction of a link with several streams; each body uses the stream that is free first."""

    rate: float
    """Bytes per second of each stream."""
    repeats: float
    """Mean delay of a body by repeated packets, in seconds."""
    free: list[float] = field(default_factory=lambda: [0.0] * STREAMS)
    """Time at which each stream is free again."""

    def through(self, begins: float, size: int) -> float:
        """Send a body that is ready at `begins`; return the time at which its last byte is sent."""
        first = min(range(len(self.free)), key=self.free.__getitem__)
        self.free[first] = max(begins, self.free[first]) + size / self.rate
        return self.free[first] + self.repeats
