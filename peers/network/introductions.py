"""Send neighbours the records of newcomers, because they ignore contributions of unknown peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from protocols.messages.table import Lane, Message, PeerRecords
from protocols.signed.records import ANNOUNCE_SECONDS
from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import PeerInfo

INTRODUCED_SECONDS = 2 * ANNOUNCE_SECONDS
"""Seconds for which a peer counts as a newcomer; later the directory has its record."""


class Introductions:
    """The newcomers whose records each neighbour got."""

    def __init__(
        self, known: Mapping[PeerId, PeerInfo], post: Callable[[PeerId, Lane, Message], bool]
    ) -> None:
        """`known` has the peers of the membership; `post` sends a message to a neighbour."""
        self._known = known
        self._post = post
        self._introduced: dict[PeerId, set[PeerId]] = {}
        """Maps neighbour to the newcomers whose records were sent to it."""

    def introduce(self, contributor: PeerId, peers: Iterable[PeerId], now: float) -> None:
        """Send these peers the record of `contributor`, once each. Does nothing if this peer met the
        contributor over `INTRODUCED_SECONDS` ago. Peers that sent that record here (`tellers`) do not get
        it."""
        known = self._known.get(contributor)
        if known is None or known.stage < 0 or now > known.met_at + INTRODUCED_SECONDS:
            return
        for peer in peers:
            introduced = self._introduced.setdefault(peer, set())
            if contributor not in introduced and peer not in (contributor, *known.tellers):
                introduced.add(contributor)
                self._post(peer, "group", PeerRecords([known.record]))

    def forget(self, peer: PeerId) -> None:
        """Forget what a neighbour got, because its links have ended."""
        self._introduced.pop(peer, None)
