"""By how much the run's owner has the learning rate changed, and from which round on.

A factor is a whole number of thousandths and scales the whole units of a step (model/fixed_point.py), so that
all peers get the same bits on any machine. Which factor a round has is part of its set: the digest of the set
says it (rounds/contribution_sets.py), the group settles it, and who hears of an order late takes up what is
settled.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = 1000
"""The factor 1, in thousandths: the learning rate of the manifest."""
LARGEST_FACTOR = 100 * WHOLE
MOST_RATES = 64
"""In an order, the newest; a factor that is forgotten is missed only by who catches up over its rounds."""
MOST_UNITS = 1 << 30
"""A step of 256: no use, but the largest int32 is near."""


@dataclass(frozen=True, slots=True)
class Rate:
    """From a round on, in the place of all that was ordered before for it and later ones."""

    from_round: int
    factor: int
    """Thousandths, 1 to LARGEST_FACTOR."""


Rates = tuple[Rate, ...]
"""In the order in which they were given. What is replaced stays: a round may be settled with it."""


def factor_of(rates: Rates, round: int) -> int:
    """Thousandths."""
    return next((rate.factor for rate in reversed(rates) if rate.from_round <= round), WHOLE)


def factors(rates: Rates) -> tuple[int, ...]:
    """All that some round can have been settled with."""
    return tuple(dict.fromkeys((WHOLE, *(rate.factor for rate in reversed(rates)))))


def scaled(units: int, factor: int) -> int:
    """A learning rate in whole units, times a factor; at least 1 (fixed_point.learning_rate_units)."""
    if factor == WHOLE:
        return units
    return max(1, min(MOST_UNITS, (units * factor + WHOLE // 2) // WHOLE))


def in_words(factor: int) -> str:
    """As people write it: 0.5."""
    return f"{factor / WHOLE:.3f}".rstrip("0").rstrip(".")
