"""Round-trip times from beats: each side tells which beat of the other it heard last, and how long ago."""

from __future__ import annotations

from dataclasses import dataclass

from peers.telemetry.counters import Timings
from swarmnet.identifiers import PeerId

BEATS_KEPT = 32
SMOOTHING = 0.1


@dataclass(slots=True)
class _Echo:
    """The newest beat of a neighbour, and when it came."""

    sequence: int
    at: float


class Echoes:
    """Times in seconds on the caller's clock."""

    def __init__(self, timings: Timings) -> None:
        self.timings = timings
        self.sequence = 0
        """Of the newest own beat."""
        self._sent: dict[int, float] = {}
        self._heard: dict[PeerId, _Echo] = {}
        self.round_trips: dict[PeerId, float] = {}
        """Of each neighbour: the quickest lately, one that has become slower is believed by and by."""

    def beat(self, now: float) -> None:
        """The next beat goes out."""
        self.sequence += 1
        oldest = self.sequence - BEATS_KEPT
        self._sent = {sequence: at for sequence, at in self._sent.items() if sequence > oldest}
        self._sent[self.sequence] = now

    def of(self, peer: PeerId, now: float) -> tuple[int, float]:
        """Which of its beats to name, and how many seconds ago that came; -1: none."""
        echo = self._heard.get(peer)
        return (echo.sequence, now - echo.at) if echo is not None else (-1, 0.0)

    def heard(self, peer: PeerId, sequence: int, echo: int, delay_seconds: float, now: float) -> None:
        self._heard[peer] = _Echo(sequence, now)
        sent_at = self._sent.get(echo)
        if sent_at is not None:
            seconds = max(0.0, now - sent_at - delay_seconds)
            self.timings.append(("round trip", seconds))
            known = self.round_trips.get(peer, seconds)
            self.round_trips[peer] = min(seconds, known + SMOOTHING * (seconds - known))

    def forget(self, peer: PeerId) -> None:
        self._heard.pop(peer, None)
        self.round_trips.pop(peer, None)
