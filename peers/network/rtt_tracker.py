"""Measure round-trip times from heartbeats. A heartbeat echoes the number of the last one that its sender
received, and how long ago that was. Round trip = now - send time of the echoed one - that delay."""

from __future__ import annotations

from dataclasses import dataclass

from peers.telemetry.counters import Timings
from swarmnet.identifiers import PeerId

BEATS_KEPT = 32
SMOOTHING = 0.1


@dataclass(slots=True)
class _ReceivedHeartbeat:
    """The newest heartbeat of a neighbour, and when it arrived."""

    sequence: int
    at: float


class RttTracker:
    """Round-trip times of all neighbours, in seconds on the caller's clock."""

    def __init__(self, timings: Timings) -> None:
        self.timings = timings
        self.sequence = 0
        """Sequence of this peer's newest heartbeat."""
        self._sent: dict[int, float] = {}
        """Send time of this peer's newest heartbeats, by sequence."""
        self._received: dict[PeerId, _ReceivedHeartbeat] = {}
        self.round_trips: dict[PeerId, float] = {}
        """Round-trip time by neighbour: the minimum, which slowly rises towards longer measurements."""

    def beat(self, now: float) -> None:
        """Record that the next heartbeat is sent now, and forget the send times of old ones."""
        self.sequence += 1
        oldest = self.sequence - BEATS_KEPT
        self._sent = {sequence: at for sequence, at in self._sent.items() if sequence > oldest}
        self._sent[self.sequence] = now

    def of(self, peer: PeerId, now: float) -> tuple[int, float]:
        """Return sequence and age in seconds of the neighbour's last heartbeat; (-1, 0) if there is none."""
        newest = self._received.get(peer)
        return (newest.sequence, now - newest.at) if newest is not None else (-1, 0.0)

    def on_echo(self, peer: PeerId, sequence: int, echo: int, delay_seconds: float, now: float) -> None:
        """Record heartbeat `sequence` of a neighbour, which echoes this peer's heartbeat `echo`. The
        neighbour sent it `delay_seconds` after it had received that one. Measure the round trip if the send
        time of `echo` is known. The kept value is the minimum, raised a little by longer ones."""
        self._received[peer] = _ReceivedHeartbeat(sequence, now)
        sent_at = self._sent.get(echo)
        if sent_at is not None:
            seconds = max(0.0, now - sent_at - delay_seconds)
            self.timings.append(("round trip", seconds))
            known = self.round_trips.get(peer, seconds)
            self.round_trips[peer] = min(seconds, known + SMOOTHING * (seconds - known))

    def forget(self, peer: PeerId) -> None:
        self._received.pop(peer, None)
        self.round_trips.pop(peer, None)
