"""Share one process's upload rate between its messages.

Pieces of messages queue for a token bucket. Control messages go first, then gradients and contributions.
Neither can fill a link, because gradients follow activations. Activations and snapshots share what is left.
Each piece has a deadline, which is later for a snapshot, and the earliest deadline is next. A full link
therefore slows down newcomers first, but never stops them. The module does no IO. All times are seconds.
"""

from __future__ import annotations

import heapq
import itertools

TURNS = ((0, 0.0), (1, 0.0), (2, 0.0), (2, 0.5))
"""(Turn, seconds until the deadline) by priority of the message (`protocols/messages/table.py`): control,
gradients and contributions, activations, snapshots. Snapshots must progress, because a newcomer drops a
holder that is silent for 3 s (`swarmnet/snapshots/fetch.py`)."""
BURST_SECONDS = 0.1
"""Burst after a pause, in seconds of the rate. A larger burst would fill the link's own queue."""


class UploadShare:
    """`ask` queues a piece, `granted` returns the pieces that may be sent now. `next_grant` returns when to
    call `granted` again."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"{bytes_per_second} bytes per second is no rate")
        self.bytes_per_second = bytes_per_second
        self._burst = BURST_SECONDS * bytes_per_second
        self._level = self._burst
        """Bytes that may be sent now; below 0 after a larger piece until its time has passed."""
        self._at = now
        self._waiting: list[tuple[int, float, int, int]] = []
        """A heap of (turn, deadline, ticket, size)."""
        self._order = itertools.count()
        self._withdrawn: set[int] = set()

    def change_rate(self, bytes_per_second: float, now: float) -> None:
        """Use another rate from now on. What was overdrawn at the old rate is forgiven."""
        if bytes_per_second <= 0:
            raise ValueError(f"{bytes_per_second} bytes per second is no rate")
        self.bytes_per_second = bytes_per_second
        self._burst = BURST_SECONDS * bytes_per_second
        self._level = min(self._burst, max(0.0, self._level))
        self._at = now

    def ask(self, size: int, priority: int, now: float) -> int:
        """Queue `size` bytes for sending. Returns their ticket, a number that `granted` returns later."""
        turn, patience = TURNS[min(max(priority, 0), len(TURNS) - 1)]
        ticket = next(self._order)
        heapq.heappush(self._waiting, (turn, now + patience, ticket, size))
        return ticket

    def withdraw(self, ticket: int) -> None:
        """Cancel a ticket that was not granted, because its link has ended."""
        self._withdrawn.add(ticket)

    def granted(self, now: float) -> list[int]:
        """Return the tickets that may be sent now, in order, and charge their bytes. Pieces are granted while
        the bucket is positive; the last one may overdraw it. Withdrawn tickets are dropped."""
        self._level = min(self._burst, self._level + (now - self._at) * self.bytes_per_second)
        self._at = now
        tickets = []
        while self._waiting:
            _, _, ticket, size = self._waiting[0]
            is_withdrawn = ticket in self._withdrawn
            if self._level <= 0 and not is_withdrawn:
                break
            heapq.heappop(self._waiting)
            if is_withdrawn:
                self._withdrawn.discard(ticket)
            else:
                self._level -= size
                tickets.append(ticket)
        return tickets

    def next_grant(self, now: float) -> float:
        """Return when the next ticket is granted; infinity if none waits."""
        if not self._waiting:
            return float("inf")
        level = self._level + (now - self._at) * self.bytes_per_second
        # A byte more than is missing: at a level of exactly 0 nothing is granted, and no timer would be set.
        return now if level > 0 else now + (1.0 - level) / self.bytes_per_second
