"""Remembers which peers sent something forged, and for how long this peer refuses their links.

An honest peer verifies what it relays, so only a faulty peer sends bytes with a false signature. The time
doubles with each further forgery. Refusing a link is local: whose contributions count does not depend on it.
All times are in seconds.
"""

from __future__ import annotations

from collections import OrderedDict

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId

FIRST_REFUSAL_SECONDS, LONGEST_REFUSAL_SECONDS = 10.0, 600.0
"""How long a peer is refused after its first forgery, and at most. A peer whose memory flips a bit is soon
back, and an attacker disturbs a group at most once in ten minutes."""
MAX_FORGERS = 4096
"""Peers remembered. Keys are free, so their number needs a bound: the oldest forgery is forgotten first."""


class Forgers:
    """The peers that have sent something forged."""

    def __init__(self) -> None:
        self._forgeries: OrderedDict[PeerId, tuple[int, float]] = OrderedDict()
        """Peer -> number of forgeries, and until when it is refused; oldest forgery first."""

    def forged(self, peer: PeerId, now: float) -> None:
        """Refuse a peer from now on, twice as long as the last time. The time starts small again for a peer
        that has not forged anything for `LONGEST_REFUSAL_SECONDS` since it was last refused. More
        forgeries while it is refused, which were under way before, count as one."""
        count, until = self._forgeries.get(peer, (0, float("-inf")))
        if now < until:
            return
        if now >= until + LONGEST_REFUSAL_SECONDS:
            count = 0
        pause = doubled(FIRST_REFUSAL_SECONDS, count, LONGEST_REFUSAL_SECONDS)
        self._forgeries[peer] = count + 1, now + pause
        self._forgeries.move_to_end(peer)
        if len(self._forgeries) > MAX_FORGERS:
            self._forgeries.popitem(last=False)

    def refuses(self, peer: PeerId, now: float) -> bool:
        """Return whether links to and from a peer are refused now."""
        _, until = self._forgeries.get(peer, (0, float("-inf")))
        return now < until
