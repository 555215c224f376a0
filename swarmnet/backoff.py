"""Exponential backoff: how long to wait before something that has failed is tried again."""

from __future__ import annotations

MAX_DOUBLINGS = 30
"""Bound on the exponent, a factor of a billion. Without it the power of two would overflow a float three
hours after a peer began to fail every ten seconds."""


def doubled(first_seconds: float, times: int, longest_seconds: float) -> float:
    """Return the pause in seconds after `times` earlier pauses. It begins with `first_seconds`, doubles each
    time, and is at most `longest_seconds`."""
    return min(longest_seconds, first_seconds * 2.0 ** min(times, MAX_DOUBLINGS))
