"""Who counts no more since it lied about its work, by what is settled: so all of a group come to the same.

Each peer that has computed a lie again says so in its contributions (`Commitment.accused`), and so do those
that follow. A peer is convicted by the first settled set in which more than half of those who can judge it
say so, and a third of all who are in the set, at least two. Who can judge are those that compute with its
settings, the others follow: they could not tell a lie from another rounding. Where its settings are not known
(it was gone before this peer came) everybody counts as one who can. It is out from `window` + 1 rounds after
that set on: no peer has applied that round when the set settles.

Whoever comes later has not seen that set, and cannot compute old rounds again. It learns it from the next
one, for all repeat in each contribution who is convicted, and from which round on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from swarmnet.audits.commitment import MOST_ACCUSED, NOT_YET, Accused, Commitment
from swarmnet.identifiers import PeerId
from swarmnet.rounds.audits import MOST_CONVICTED

FEWEST = 2
"""One alone convicts nobody: a single key that claims the victim's settings would be enough."""
LEAST_SHARE = 3
"""One in so many of a set: fewer, by claiming settings that are rare, could shut those out who have them."""


class Convictions:
    """A fold over the settled sets of one history."""

    def __init__(self, window: int) -> None:
        """`window`: of the run's rounds."""
        self._window = window
        self.first: dict[PeerId, int] = {}
        """From that round on nothing of them counts."""
        self._settings: dict[PeerId, bytes] = {}
        """Of everybody who was in a set, as last committed to."""

    def settled(self, round: int, said: Mapping[PeerId, Commitment]) -> list[PeerId]:
        """Whose first round is new, or earlier than was known."""
        for peer, commitment in said.items():
            self._settings[peer] = commitment.settings
        named = Counter(each.peer for commitment in said.values() for each in commitment.accused)
        return [peer for peer in sorted(named) if self._judge(peer, round, said)]

    def accused(self, found: Sequence[PeerId]) -> tuple[Accused, ...]:
        """What this peer says in its next contribution. `found`: of whom it has proofs."""
        peers = [*self.first, *(peer for peer in found if peer not in self.first)]
        return tuple(Accused(peer, self.first.get(peer, NOT_YET)) for peer in peers[-MOST_ACCUSED:])

    def _judge(self, accused: PeerId, round: int, said: Mapping[PeerId, Commitment]) -> bool:
        others = {peer: of for peer, of in said.items() if self._counts(peer, round) and peer != accused}
        named = ((peer, each) for peer, of in others.items() for each in of.accused)
        saying = {peer: each.first for peer, each in named if each.peer == accused}
        settings = self._settings.get(accused)
        judges = {peer for peer, of in others.items() if settings in (None, of.settings)}
        if (
            len(saying) < FEWEST
            or LEAST_SHARE * len(saying) < len(others)
            or 2 * len(judges & saying.keys()) <= len(judges)
        ):
            return False
        first = _most_named(saying.values())
        first = round + self._window + 1 if first == NOT_YET else first
        if first >= self.first.get(accused, NOT_YET) or len(self.first) >= MOST_CONVICTED:
            return False
        self.first[accused] = first
        return True

    def _counts(self, peer: PeerId, round: int) -> bool:
        return round < self.first.get(peer, NOT_YET)


def _most_named(firsts: Iterable[int]) -> int:
    """Of as many the smallest."""
    counts = Counter(firsts)
    return min(counts, key=lambda first: (-counts[first], first))
