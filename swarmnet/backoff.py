"""How long to leave alone what has failed: longer each time, up to a bound."""

from __future__ import annotations

MOST_DOUBLINGS = 30
"""A billion times the first pause. Without a bound, the power of two of a peer that fails every ten seconds
is no float any more after three hours."""


def doubled(first_seconds: float, times: int, longest_seconds: float) -> float:
    """The pause after so many earlier ones: the first, then twice as long each, at most the longest."""
    return min(longest_seconds, first_seconds * 2.0 ** min(times, MOST_DOUBLINGS))
