"""Who sends next where the whole process may send only so many bytes a second.

A token bucket that pieces of messages queue for. What keeps the swarm together goes first, then gradients
and contributions: neither can fill a line, for gradients come of activations. Activations and snapshots share
what is left: each piece has a time by which it is wanted, later for a snapshot, and the earliest is next. A
full line thus slows down newcomers first, and never to a halt. No IO. Times in seconds.
"""

from __future__ import annotations

import heapq
import itertools

TURNS = ((0, 0.0), (1, 0.0), (2, 0.0), (2, 0.5))
"""By priority of the message (protocols/messages/table.py): control, gradients and contributions,
activations, snapshots; who goes first, and seconds until it is wanted. A newcomer drops a holder that is
silent for 3 s (swarmnet/snapshots/fetch.py): snapshots must trickle."""
BURST_SECONDS = 0.1
"""What may leave at once after a pause, in seconds of the rate: more would fill the line's own queue."""


class UploadShare:
    """`ask` for leave to send, `granted` says who may now, `next_grant` when to look again."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"{bytes_per_second} bytes per second is no rate")
        self.bytes_per_second = bytes_per_second
        self._burst = BURST_SECONDS * bytes_per_second
        self._level, self._at = self._burst, now
        """Bytes that may leave now; below 0 after a piece that was larger: its time is still to pass."""
        self._waiting: list[tuple[int, float, int, int]] = []
        """A heap of (turn, wanted by, ticket, size)."""
        self._order = itertools.count()
        self._withdrawn: set[int] = set()

    def ask(self, size: int, priority: int, now: float) -> int:
        """Queue for sending `size` bytes; the ticket under which that is granted."""
        turn, patience = TURNS[min(max(priority, 0), len(TURNS) - 1)]
        ticket = next(self._order)
        heapq.heappush(self._waiting, (turn, now + patience, ticket, size))
        return ticket

    def withdraw(self, ticket: int) -> None:
        """It is not sent after all: its link has ended. Only for a ticket that was not granted."""
        self._withdrawn.add(ticket)

    def granted(self, now: float) -> list[int]:
        """Tickets of those who may send now, in order."""
        self._level = min(self._burst, self._level + (now - self._at) * self.bytes_per_second)
        self._at = now
        granted = []
        while self._waiting and (self._level > 0 or self._waiting[0][2] in self._withdrawn):
            _, _, ticket, size = heapq.heappop(self._waiting)
            if ticket in self._withdrawn:
                self._withdrawn.discard(ticket)
                continue
            self._level -= size
            granted.append(ticket)
        return granted

    def next_grant(self, now: float) -> float:
        """When the next may send; infinity if nobody waits."""
        if not self._waiting:
            return float("inf")
        level = self._level + (now - self._at) * self.bytes_per_second
        # A byte more than what is missing: at a level of exactly 0 nothing is granted, and nobody would wait.
        return now if level > 0 else now + (1.0 - level) / self.bytes_per_second
