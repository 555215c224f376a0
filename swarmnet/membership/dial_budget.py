"""How many addresses of strangers a peer tries: what is told costs nothing to tell, and others pay for it.

A record can name any address, of whomever. So dials of peers that are not known to be where they say are
counted by the addresses that they try; those that lead to somebody are given back, so that a large swarm is
joined as fast as it answers. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import range_of

BURST_ADDRESSES = 128
"""A newcomer among many wants up to 74 links at once (10 in its group, 32 in each stage beside it), most of
one or two addresses."""
ADDRESSES_PER_MINUTE = 10
"""After that: who dials 5,000 addresses in two minutes is a scanner in somebody's hands (measured)."""
RANGE_FAILURES = 8
"""In a row, before an address range is left alone: of a house or cluster that has just been switched off, so
many records stay at most."""
RANGE_SECONDS, LONGEST_RANGE_SECONDS = 10.0, 600.0
"""How long it is left alone after that: doubled with each further failure."""
MOST_RANGES = 4096


class DialBudget:
    def __init__(self) -> None:
        self._left = float(BURST_ADDRESSES)
        self._filled_at: float | None = None
        self._under_way: dict[PeerId, tuple[int, frozenset[str]]] = {}
        """What each dial took, and the ranges that it tries."""
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Range -> failures in a row, and when the last one was."""

    def take(self, peer: PeerId, addresses: Sequence[str], now: float) -> bool:
        """Whether this stranger may be dialled now; if so, it is counted until `reached` or `failed`."""
        if self._filled_at is not None:
            filled = self._left + (now - self._filled_at) * ADDRESSES_PER_MINUTE / 60.0
            self._left = min(float(BURST_ADDRESSES), filled)
        self._filled_at = now
        cost, ranges = max(1, len(addresses)), frozenset(map(range_of, addresses))
        if cost > self._left or any(now < self._free_at(each) for each in ranges):
            return False
        self._left -= cost
        self._under_way[peer] = cost, ranges
        return True

    @property
    def spent(self) -> bool:
        """Whether there is nothing left now for anybody."""
        return self._left < 1.0

    def reached(self, peer: PeerId) -> None:
        """It was there: that dial cost nothing, and its networks are in order."""
        cost, ranges = self._under_way.pop(peer, (0, frozenset()))
        self._left = min(float(BURST_ADDRESSES), self._left + cost)
        for each in ranges:
            self._failures.pop(each, None)

    def failed(self, peer: PeerId, now: float) -> None:
        for each in self.ended(peer):
            self._failures[each] = self._failures.pop(each, (0, 0.0))[0] + 1, now
            if len(self._failures) > MOST_RANGES:
                self._failures.popitem(last=False)

    def ended(self, peer: PeerId) -> frozenset[str]:
        """That dial is over, whatever came of it; the ranges that it tried, if it was counted."""
        return self._under_way.pop(peer, (0, frozenset[str]()))[1]

    def _free_at(self, range: str) -> float:
        failures, at = self._failures.get(range, (0, 0.0))
        if failures < RANGE_FAILURES:
            return float("-inf")
        return at + doubled(RANGE_SECONDS, failures - RANGE_FAILURES, LONGEST_RANGE_SECONDS)
