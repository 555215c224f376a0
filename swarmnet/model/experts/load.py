"""Count the tokens that the routers of a stage send to each expert, and measure the imbalance.

Tokens are counted when a layer is computed for gradients: once for each microbatch, recomputed or not. The
counts are plain Python integers, which another thread may read while they grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Routed = Mapping[int, Sequence[int]]
"""Maps a layer to the number of tokens of each of its experts."""


def busiest_ratio(routed: Routed, before: Routed) -> float | None:
    """Return the tokens of the busiest expert over the mean of its layer's experts, averaged over layers. It
    counts the tokens of `routed` that came since the counts `before`. A value of 1 is even (MaxVio of
    arXiv:2408.15664 is this minus one). None if no tokens came."""
    ratios = []
    for layer, counts in routed.items():
        tokens = [now - earlier for earlier, now in zip(before[layer], counts, strict=True)]
        if any(tokens):
            ratios.append(max(tokens) * len(tokens) / sum(tokens))
    return sum(ratios) / len(ratios) if ratios else None
