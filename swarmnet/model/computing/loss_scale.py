"""Scale gradients so that they fit into float16 during the backward pass of a stage.

float16 holds 6e-8 to 65,504. Gradients are multiplied by a power of two before the backward pass, and divided
by it after (Micikevicius et al., arXiv:1710.03740, section 3.2). A backward pass is linear in the gradient at
its start, and each stage starts from one that it has received. So its largest value gives the factor, for
each microbatch alone, and peers need not agree on it. If a result is not finite, the microbatch is dropped,
and later factors are smaller for a while; `MIN_EXPONENT` bounds what false gradients can do to them.
"""

from __future__ import annotations

from math import frexp, isfinite

MAX_EXPONENT = 4
"""The largest value becomes at most 2 ** 4: sums over the tokens may be 2 ** 12 times larger."""
MIN_EXPONENT = -12
"""Values down to 2 ** -12 of the largest still stay normal numbers of float16."""
GROWTH_INTERVAL = 2000
"""Finite microbatches after which the factor is doubled, as torch.amp.GradScaler does."""


class LossScale:
    """Chooses the factor of each microbatch. Devices that hold a stage together make the same calls."""

    def __init__(self, is_used: bool) -> None:
        """Without `is_used` all factors are 1."""
        self.is_used = is_used
        self._exponent = 0
        self._finite = 0

    def factor(self, largest: float) -> float:
        """Return the power of two for a backward pass from a gradient with this largest absolute value."""
        if not self.is_used or not isfinite(largest) or largest <= 0.0:
            return 1.0
        _, exponent = frexp(largest)
        return 2.0 ** min(self._exponent - exponent, 127)  # The largest power of two of float32.

    def record(self, is_finite: bool) -> None:
        """Record whether a microbatch's gradients were finite."""
        self._finite = self._finite + 1 if is_finite else 0
        if not is_finite:
            self._exponent = max(MIN_EXPONENT, self._exponent - 1)
        elif self._finite >= GROWTH_INTERVAL:
            self._exponent = min(MAX_EXPONENT, self._exponent + 1)
            self._finite = 0
