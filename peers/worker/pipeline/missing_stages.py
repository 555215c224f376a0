"""Notice stages that microbatches wait for, because no peer serves them."""

from __future__ import annotations

from peers.telemetry import log_events
from swarmnet.routing.next_hop import NextHop

LOOK_SECONDS = 1.0
"""Interval for checking missing stages. Peers send heartbeats as often, so nothing is known sooner."""


class MissingStages:
    def __init__(self, ways: NextHop, log_event: log_events.LogEvent) -> None:
        self.now: tuple[int, ...] = ()
        """Stages that microbatches here wait for: they have no live peer and cannot be skipped."""
        self._ways = ways
        self._log_event = log_event
        self._look_at = 0.0

    def look_soon(self) -> None:
        """Check at the next call. Perhaps no peer is left whose heartbeats would trigger the check later."""
        self._look_at = 0.0

    def look(self, now: float) -> bool:
        """Once a second, log which stages have no peer, and when they have one again. Returns whether it was
        time for that."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        missing = self._ways.missing()
        if missing != self.now:
            self.now = missing
            if missing:
                self._log_event(log_events.Waiting(code="stage_missing", stages=list(missing)))
            else:
                self._log_event(log_events.WaitingOver())
        return True
