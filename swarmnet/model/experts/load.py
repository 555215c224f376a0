"""How many tokens the routers of a stage sent to each expert, and how even that is.

Counted where a layer has its gradients computed, so once for each microbatch, recomputed or not. Plain whole
numbers of Python, which another thread may read while they grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Routed = Mapping[int, Sequence[int]]
"""Layer -> tokens of each expert of it."""


def busiest_ratio(routed: Routed, before: Routed) -> float | None:
    """Tokens of a layer's busiest expert over the mean of its experts, of what came since `before`; the mean
    of all layers. 1 is even (arXiv:2408.15664 has this less one as MaxVio). None: nothing came."""
    came = [
        [after - earlier for earlier, after in zip(before[layer], now, strict=True)]
        for layer, now in routed.items()
    ]
    ratios = [max(tokens) * len(tokens) / sum(tokens) for tokens in came if any(tokens)]
    return sum(ratios) / len(ratios) if ratios else None
