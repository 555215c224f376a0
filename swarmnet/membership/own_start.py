"""Notices that two running processes use the same identity, and distinguishes that from a restart.

Each process signs the time of its start into its records, the signed announcements in the DHT. The *sequence*
of a record is the time at which it was signed. A process that has ended signs no new record.
"""

from __future__ import annotations

from typing import Literal

MARGIN_MICROSECONDS = 3_000_000
"""Greatest difference between two clocks of one swarm (`SKEW_SECONDS` in protocols/signed/records.py)."""
MAX_STARTS = 64
"""Remembered starts of one identity: twice the number of restarts, 4 s each, within the life of a record."""


class OwnStart:
    """The start of one process. All times are in microseconds of the swarm's time."""

    def __init__(self) -> None:
        self.number = 0
        """Time of the start; 0 until the first record is signed: the swarm's time is not known before."""
        self._newest: dict[int, int] = {}
        """Start of another process -> sequence of its newest record that was seen."""

    def begin(self, now: float) -> int:
        """Return the time of the start, which the first call sets. `now`: the swarm's time in seconds."""
        if not self.number:
            self.number = max(1, int(now * 1e6))
        return self.number

    @property
    def newest_of_earlier(self) -> int:
        """The sequence of the newest record that an earlier process signed; 0 if none was seen."""
        return max(self._newest.values(), default=0)

    def saw(self, started: int, sequence: int, now: float) -> Literal["nothing", "earlier", "later"]:
        """Check a record that this peer's own key has signed at `sequence`. `started` is the start of the
        process that signed it, 0 if unknown. `now` is the swarm's time in seconds.

        Returns which other process is proven to be running: one that started earlier or later than this one.
        Any record proves a later one. An earlier one is proven by a record that was signed after this start,
        is newer than another one of that process seen before, and is not from the future."""
        if started in (0, self.number):
            return "nothing"
        if 0 < self.number < started:
            return "later"
        newest = self._newest.pop(started, None)
        self._newest[started] = max(sequence, newest if newest is not None else sequence)
        if len(self._newest) > MAX_STARTS:
            del self._newest[next(iter(self._newest))]
        is_renewed = newest is not None and sequence > newest
        latest = int(now * 1e6) + MARGIN_MICROSECONDS
        if is_renewed and self.number > 0 and self.number + MARGIN_MICROSECONDS < sequence <= latest:
            return "earlier"
        return "nothing"
