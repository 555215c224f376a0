"""Limits how often a peer answers the same request: a few times at once, since a link may be lost, and then
rarely.

It is the generic cell rate algorithm (ITU-T I.371) with one number per key. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
"""Identifies the client and what it requests."""

BURST = 4
"""Answers at once, as for slices (`audits.MAX_OF_RESULT`): a link may be lost twice and a peer restart."""


class RequestBudget(Generic[Key]):
    """The answers that are left for each key."""

    def __init__(self, refill_seconds: float, burst: int = BURST) -> None:
        """Allow `burst` answers for each key, and then one more each `refill_seconds`."""
        self._refill_seconds = refill_seconds
        self._burst = burst
        self._full_at: dict[Key, float] = {}
        """When each key has its whole burst again."""
        self._prune_at = 64

    def __len__(self) -> int:
        return len(self._full_at)

    def spend(self, key: Key, now: float) -> bool:
        """Return whether the request of `key` may be answered now; if so, it is counted. Keys that have their
        whole burst again are forgotten from time to time."""
        full_at = max(now, self._full_at.get(key, now)) + self._refill_seconds  # With this answer counted.
        if full_at - now > self._burst * self._refill_seconds:
            return False
        self._full_at[key] = full_at
        if len(self._full_at) >= self._prune_at:
            self._full_at = {key: at for key, at in self._full_at.items() if at > now}
            self._prune_at = 64 + 2 * len(self._full_at)
        return True
