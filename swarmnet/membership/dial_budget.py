"""Limits how many addresses of strangers a peer dials: false addresses are free to announce, and third
parties pay.

A *stranger* is a peer known by its record alone, which can name addresses of any machine. Dials of strangers
are therefore counted by the addresses that they try. A dial that succeeds is refunded, so that a large swarm
is joined as fast as it answers. An *address range* is a /24 network, or a /48 for IPv6. Times are in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import range_of

BURST_ADDRESSES = 128
"""Addresses that may be dialled at once. A newcomer wants up to 74 links: ten in its group and 32 in each
adjacent stage. Most peers have one or two addresses."""
ADDRESSES_PER_MINUTE = 10
"""Refill rate. Without it, records can make a peer a scanner of 5,000 addresses in two minutes (measured)."""
RANGE_FAILURES = 8
"""Failures in a row before an address range is paused. A house or cluster that has just been switched off
leaves at most this many records."""
RANGE_SECONDS, LONGEST_RANGE_SECONDS = 10.0, 600.0
"""Length of the pause, which doubles with each further failure, and its bound."""
MAX_RANGES = 4096
"""Address ranges of which failures are remembered."""


class DialBudget:
    """The dials of one peer to strangers, and the failures of each address range."""

    def __init__(self) -> None:
        self._left = float(BURST_ADDRESSES)
        """Addresses that may be dialled now; refilled at `ADDRESSES_PER_MINUTE` up to the burst."""
        self._filled_at: float | None = None
        self._under_way: dict[PeerId, tuple[int, frozenset[str]]] = {}
        """Cost of each dial under way, and the address ranges that it tries."""
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Range -> failures in a row, and the time of the last one."""

    def take(self, peer: PeerId, addresses: Sequence[str], now: float) -> bool:
        """Return whether a stranger with these addresses may be dialled now. If so, their number is taken
        from the budget. It must not exceed what is left, and no address may be in a range that is paused."""
        if self._filled_at is not None:
            filled = self._left + (now - self._filled_at) * ADDRESSES_PER_MINUTE / 60.0
            self._left = min(float(BURST_ADDRESSES), filled)
        self._filled_at = now
        cost = max(1, len(addresses))
        ranges = frozenset(map(range_of, addresses))
        if cost > self._left or any(now < self._paused_until(each) for each in ranges):
            return False
        self._left -= cost
        self._under_way[peer] = cost, ranges
        return True

    @property
    def spent(self) -> bool:
        """True if no further dial is possible now."""
        return self._left < 1.0

    def reached(self, peer: PeerId) -> None:
        """Refund the dial of a peer that answered, and forget failures of its address ranges."""
        cost, ranges = self._under_way.pop(peer, (0, frozenset()))
        self._left = min(float(BURST_ADDRESSES), self._left + cost)
        for each in ranges:
            self._failures.pop(each, None)

    def failed(self, peer: PeerId, now: float) -> None:
        """Count a failure, if the dial was counted, for each address range that it tried."""
        tried_ranges = self.ended(peer)
        for each in tried_ranges:
            failures, _ = self._failures.pop(each, (0, 0.0))
            self._failures[each] = failures + 1, now
            if len(self._failures) > MAX_RANGES:
                self._failures.popitem(last=False)

    def ended(self, peer: PeerId) -> frozenset[str]:
        """End a dial, whatever its outcome. Returns the address ranges that it tried; none if it was not
        counted or has ended before."""
        _, ranges = self._under_way.pop(peer, (0, frozenset[str]()))
        return ranges

    def _paused_until(self, range: str) -> float:
        """Return when the pause of a range ends after its failures; -inf if it is not paused."""
        failures, at = self._failures.get(range, (0, 0.0))
        if failures < RANGE_FAILURES:
            return float("-inf")
        return at + doubled(RANGE_SECONDS, failures - RANGE_FAILURES, LONGEST_RANGE_SECONDS)
