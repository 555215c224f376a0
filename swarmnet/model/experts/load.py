"""Count the tokens that the routers of a stage send to each expert, and measure the imbalance.

Tokens are counted when a layer is computed for gradients: once for each microbatch, recomputed or not. The
counts are plain Python integers, which another thread may read while they grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Routed = Mapping[int, Sequence[int]]
"""Maps a layer to the number of tokens of each of its experts."""


def busiest_ratio(routed: Routed, before: Routed) -> float | None:
    """Return the tokens of the busiest expert since `before` over the mean of its layer, averaged over
    layers. A value of 1 is even (MaxVio of arXiv:2408.15664 is this minus one). None if no tokens came."""
    came = [
        [after - earlier for earlier, after in zip(before[layer], now, strict=True)]
        for layer, now in routed.items()
    ]
    ratios = [max(tokens) * len(tokens) / sum(tokens) for tokens in came if any(tokens)]
    return sum(ratios) / len(ratios) if ratios else None
