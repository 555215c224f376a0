"""Changes of the shares of a run's sources by its owner, each from a round on.

They decide which text a peer reads next and are no part of what a group settles. A peer that hears of a
change late reads by the former shares until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_MIXTURES = 16
"""Maximum number of changes in an order, the newest ones."""
MAX_SOURCES = 64
LARGEST_WEIGHT = 1_000_000
"""In thousandths, as all weights here."""


@dataclass(frozen=True, slots=True)
class MixtureChange:
    """The shares of all sources from a round on. It replaces all that was ordered before for these rounds."""

    from_round: int
    weights: tuple[tuple[str, int], ...]
    """Pairs of a source's name and its weight; a source that is not named is not read."""

    def weights_of(self, names: Sequence[str]) -> list[int]:
        """Return the weights of these sources. All are zero if the change names none of them."""
        weights = dict(self.weights)
        return [weights.get(name, 0) for name in names]


Mixtures = tuple[MixtureChange, ...]
"""Changes in order of time."""


def mixture_at(mixtures: Mixtures, round: int) -> MixtureChange | None:
    """Return the newest change from this or an earlier round on; None: the manifest's weights hold."""
    return next((change for change in reversed(mixtures) if change.from_round <= round), None)
