"""Tells another living process with this peer's identity from an earlier process that has ended.

Each process signs the time of its start into its records. A process that has ended signs no new record.
"""

from __future__ import annotations

from typing import Literal

MARGIN_MICROSECONDS = 3_000_000
"""By which two clocks of one swarm may differ (SKEW_SECONDS in protocols/signed/records.py)."""
MOST_STARTS = 64
"""Starts of one identity that are remembered: twice as many as a record's life has restarts of 4 s."""


class OwnStart:
    """The start of one process. Times in microseconds of the swarm's time, as a record's sequence."""

    def __init__(self) -> None:
        self.number = 0
        """Time of the start; 0 until the first record is signed, as the swarm's time is not known before."""
        self._newest: dict[int, int] = {}
        """Other start -> sequence of its newest record that was seen."""

    def begin(self, now: float) -> int:
        """Return the number, which the first call sets. `now`: swarm's time, seconds."""
        if not self.number:
            self.number = max(1, int(now * 1e6))
        return self.number

    def saw(self, started: int, sequence: int, now: float) -> Literal["nothing", "earlier", "later"]:
        """Judge a record that the own key has signed. Returns which process is proved to live besides this.

        An earlier one is proved by a record that is newer than both this start and a record seen before.
        A later one is proved by any record, as this process still runs. `now`: swarm's time, seconds."""
        if not self.number or started in (0, self.number):
            return "nothing"
        if started > self.number:
            return "later"
        newest = self._newest.pop(started, None)
        self._newest[started] = max(sequence, newest if newest is not None else sequence)
        if len(self._newest) > MOST_STARTS:
            del self._newest[next(iter(self._newest))]
        is_renewed = newest is not None and sequence > newest
        latest = int(now * 1e6) + MARGIN_MICROSECONDS
        if is_renewed and self.number + MARGIN_MICROSECONDS < sequence <= latest:
            return "earlier"
        return "nothing"
