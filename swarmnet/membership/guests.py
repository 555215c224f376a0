"""Which of those that keep a link to this peer, for reasons of their own, get one back before they worked.

To greet costs nothing, and a link costs memory, beats and gossip. So there are places for guests, whom this
peer would not have chosen and of whose work nothing is known. Where all are taken, a newcomer takes one from
the address range with most guests: a crowd from one network cannot keep others out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from swarmnet.identifiers import PeerId

MOST_GUESTS = 64
"""Two stages' worth of peers that chose this one (MOST_ADJACENT): who has worked needs no place."""
MOST_OF_RANGE = 16
"""Guests of one public /24 or /48: a house or a rack."""


class Guests:
    def __init__(self) -> None:
        self._ranges: dict[PeerId, frozenset[str]] = {}
        self._count: Counter[str] = Counter()

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._ranges

    def __len__(self) -> int:
        return len(self._ranges)

    def admit(self, peer: PeerId, ranges: Iterable[str]) -> bool:
        """Whether it has a place now. `ranges`: of its addresses, those of which there are many elsewhere."""
        if peer in self._ranges:
            return True
        theirs = frozenset(ranges)
        here = max((self._count[each] for each in theirs), default=0)
        if here >= MOST_OF_RANGE:
            return False
        if len(self._ranges) >= MOST_GUESTS and not self._make_room(here):
            return False
        self._ranges[peer] = theirs
        self._count.update(theirs)
        return True

    def left(self, peer: PeerId) -> None:
        for each in self._ranges.pop(peer, frozenset()):
            self._count[each] -= 1
            if not self._count[each]:
                del self._count[each]

    def _make_room(self, here: int) -> bool:
        """For one of whose range there are so many: the last that came of the range with most, if more."""
        crowded, count = max(self._count.items(), key=lambda item: item[1], default=("", 0))
        if count <= here + 1:
            return False
        self.left(next(peer for peer in reversed(self._ranges) if crowded in self._ranges[peer]))
        return True
