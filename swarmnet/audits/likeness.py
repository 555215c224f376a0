"""How alike two peers' moves are that should be the same but for the rounding of their numbers.

    likeness = 2 <a, b> / (<a, a> + <b, b>)        1: the same; 0: nothing in common; -1: the opposite

Where both are as large it is the cosine of the two, and less where one is larger: to the cosine, eight times
as much of everything is the same.

Shapes: C chunks of a plane, M numbers of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from swarmnet.optimizer.moved.code import Moves

CHUNKS_AT_ONCE = 1024
"""Of 4,096 numbers at most: 64 MiB in float64."""

Pair = tuple[Moves, Moves]
"""Of one plane, what each moves there."""


def likeness(pairs: Iterable[Pair]) -> float:
    """Of two contributions, plane by plane; 0 where neither moves anything."""
    both, ones, others = _products(pairs)
    return 2 * both / (ones + others) if ones + others else 0.0


def cosine(pairs: Iterable[Pair]) -> float:
    """Likewise, whatever their sizes."""
    both, ones, others = _products(pairs)
    return both / float(ones * others) ** 0.5 if ones * others else 0.0


def _products(pairs: Iterable[Pair]) -> tuple[float, float, float]:
    """Of the first with the second, and of each with itself."""
    sums = torch.zeros(3, dtype=torch.float64)
    for one, other in pairs:
        for start in range(0, len(one.loudest()), CHUNKS_AT_ONCE):
            part = slice(start, start + CHUNKS_AT_ONCE)
            sums += _of(one.rows(part).units().double().cpu(), other.rows(part).units().double().cpu())
    both, ones, others = sums.tolist()
    return both, ones, others


def _of(one_CM: Tensor, other_CM: Tensor) -> Tensor:
    """float64 [3]."""
    return torch.stack([(one_CM * other_CM).sum(), (one_CM**2).sum(), (other_CM**2).sum()])
