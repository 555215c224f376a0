"""Exponential backoff: how long to wait before something that has failed is tried again."""

from __future__ import annotations

MAX_DOUBLINGS = 30
"""Bound on the exponent, a factor of a billion. Without it the power of two would overflow a float three
hours after a peer began to fail every ten seconds."""


def doubled(first_seconds: float, times: int, max_seconds: float) -> float:
    """Return the pause in seconds after `times` earlier pauses. It begins with `first_seconds`, doubles each
    time, and is at most `max_seconds`."""
    return min(max_seconds, first_seconds * 2.0 ** min(times, MAX_DOUBLINGS))
