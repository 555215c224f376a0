"""Decides which peers that link to this one, and have not contributed yet, get a link in return.

A handshake is free, while a link costs memory, heartbeats and gossip. The number of *guests* is therefore
limited: peers that this one would not have chosen and of whose work nothing is known. When all places are
taken, a newcomer replaces one of the address range with most guests. Sybils of one network cannot keep others
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from swarmnet.identifiers import PeerId

MAX_GUESTS = 64
"""Most guests: two stages of peers that chose this one (`MAX_ADJACENT`). Contributors need no place."""
MAX_OF_RANGE = 16
"""Most guests of one public /24 or /48: a household or a rack."""


class Guests:
    """The guests of one peer, and how many of them each address range has."""

    def __init__(self) -> None:
        self._ranges: dict[PeerId, frozenset[str]] = {}
        self._count: Counter[str] = Counter()

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._ranges

    def __len__(self) -> int:
        return len(self._ranges)

    def admit(self, peer: PeerId, ranges: Iterable[str]) -> bool:
        """Give a peer a place if it has none. Returns whether it has one now. `ranges`: its public address
        ranges. It gets none if one of them has `MAX_OF_RANGE` guests. If all places are taken, a guest of
        another range must make room, which happens only if that range has at least two guests more."""
        if peer in self._ranges:
            return True
        own_ranges = frozenset(ranges)
        guests_of_range = max((self._count[each] for each in own_ranges), default=0)
        if guests_of_range >= MAX_OF_RANGE:
            return False
        if len(self._ranges) >= MAX_GUESTS and not self._make_room(guests_of_range):
            return False
        self._ranges[peer] = own_ranges
        self._count.update(own_ranges)
        return True

    def left(self, peer: PeerId) -> None:
        """Free the place of a guest, if it has one."""
        for each in self._ranges.pop(peer, frozenset()):
            self._count[each] -= 1
            if not self._count[each]:
                del self._count[each]

    def _make_room(self, guests_of_range: int) -> bool:
        """Remove a guest for a newcomer whose range has `guests_of_range` guests: the newest one of the range
        with most guests. Returns False if that range does not have at least two more."""
        largest, count = max(self._count.items(), key=lambda item: item[1], default=("", 0))
        if count <= guests_of_range + 1:
            return False
        newest = next(peer for peer in reversed(self._ranges) if largest in self._ranges[peer])
        self.left(newest)
        return True
