"""Changes of the learning rate by the run's owner, each from a round on.

Weights lie on a fixed-point grid, and a *unit* is the distance of two grid points (`model/fixed_point.py`). A
factor is an integer number of thousandths and scales the learning rate in units. Therefore all peers get the
same bits on any machine. A round's factor is part of its set: the digest of the set covers it
(`rounds/contribution_sets.py`), and the group settles it. A peer that gets an order late adopts what is
settled.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = 1000
"""The factor 1 in thousandths: the manifest's learning rate."""
LARGEST_FACTOR = 100 * WHOLE
MAX_RATES = 64
"""Maximum number of rates in an order, the newest ones. Only a peer that catches up needs older ones."""
MAX_UNITS = 1 << 30
"""Maximum step in units, which is 256. No useful step is larger, and int32 does not overflow."""


@dataclass(frozen=True, slots=True)
class RateChange:
    """A learning rate from a round on. It replaces all that was ordered before for this and later rounds."""

    from_round: int
    factor: int
    """Thousandths, 1 to LARGEST_FACTOR."""


Rates = tuple[RateChange, ...]
"""Rates in order of time. Replaced ones are kept, because a round may be settled with them."""


def factor_of(rates: Rates, round: int) -> int:
    """Return the factor of a round in thousandths: that of the newest change from this or an earlier round
    on, else `WHOLE`."""
    return next((rate.factor for rate in reversed(rates) if rate.from_round <= round), WHOLE)


def factors(rates: Rates) -> tuple[int, ...]:
    """Return all factors that a round may have been settled with, each once: `WHOLE`, then newest first."""
    return tuple(dict.fromkeys((WHOLE, *(rate.factor for rate in reversed(rates)))))


def scaled(units: int, factor: int) -> int:
    """Return a learning rate in units times a factor, rounded, from 1 to `MAX_UNITS`. The factor 1 returns
    `units` unchanged."""
    if factor == WHOLE:
        return units
    rounded = (units * factor + WHOLE // 2) // WHOLE
    return max(1, min(MAX_UNITS, rounded))


def in_words(factor: int) -> str:
    """Return the factor as a decimal, as in 0.5."""
    return f"{factor / WHOLE:.3f}".rstrip("0").rstrip(".")
