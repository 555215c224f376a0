"""How often a peer answers the same request: a few times at once, for a link may be lost, then rarely.

The generic cell rate algorithm (ITU-T I.371): one number a key. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
"""Who asks, and for what."""

BURST = 4
"""Answers at once, as to questions about slices (audits.MOST_OF_RESULT): a link may be lost twice, and the
peer started anew."""


class RequestBudget(Generic[Key]):
    def __init__(self, refill_seconds: float, burst: int = BURST) -> None:
        """After `burst` answers one more is given each `refill_seconds`."""
        self._refill_seconds, self._burst = refill_seconds, burst
        self._full_at: dict[Key, float] = {}
        """When each key has its whole burst again."""
        self._prune_at = 64

    def __len__(self) -> int:
        return len(self._full_at)

    def spend(self, key: Key, now: float) -> bool:
        """Whether the request is answered now; if so, it is counted."""
        full_at = max(now, self._full_at.get(key, now)) + self._refill_seconds
        if full_at - now > self._burst * self._refill_seconds:
            return False
        self._full_at[key] = full_at
        if len(self._full_at) >= self._prune_at:
            self._full_at = {key: at for key, at in self._full_at.items() if at > now}
            self._prune_at = 64 + 2 * len(self._full_at)
        return True
