"""Decides when a peer sends its neighbours Progress, announcements of contributions, and requests for ids.

Progress says how far the peer is, an announcement which contributions it holds. Both are delayed a little, so
that a burst of changes goes out in one message. To *relay* a contribution is to announce one that another
peer made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.events import Reference, RequestIds, SendAnnounce

URGENT_SECONDS = 0.05
"""Shortest interval of Progress when others wait for a change. A commit takes about as long."""
CALM_SECONDS = 0.25
"""Shortest interval after a set grew. Announcements reported that; Progress finds what they missed."""
QUIET_SECONDS = 1.0
"""Longest interval. Progress is repeated without changes, because it is the group's anti-entropy."""
RELAY_SECONDS = 0.02
"""Delay in which announcements of others' contributions are bundled. In a group of hundreds, one message for
each would cost more than the contributions."""
SHARE_PARTS = 16
"""Progress is sent when this peer's tokens grew by one such part of its share of the round. The group then
closes a round with 3 % too many tokens at most, on average."""


class Gossip:
    """The pending messages of one peer. All times are in seconds on the caller's clock."""

    def __init__(self, now: float) -> None:
        self._sent_at = now
        self._due_at = now
        self._tokens_sent = 0
        self._relays: dict[PeerId, dict[ContributionId, Reference]] = {}
        """Neighbour -> contributions that will be announced to it."""
        self._relay_at = float("inf")
        self._differing_until = float("inf")
        """No set of a neighbour has differed long enough before this time."""

    # -- Progress -------------------------------------------------------------------------------------

    def changed(self, within: float) -> None:
        """Schedule Progress `within` seconds after the last one, or keep an earlier schedule."""
        self._due_at = min(self._due_at, self._sent_at + within)

    def at_once(self, now: float) -> None:
        self._due_at = min(self._due_at, now)

    def committed(self, tokens: int, share: int) -> None:
        """Schedule Progress if this peer's tokens grew enough since the last one.

        `tokens`: committed here for the round; `share`: what each peer of the group brings to a round."""
        if tokens >= self._tokens_sent + max(1, share // SHARE_PARTS):
            self.changed(URGENT_SECONDS)

    def should_send(self, tokens: int, now: float) -> bool:
        """Return whether the caller must send Progress now. If so, it counts as sent with these `tokens`."""
        if now < self._due_at:
            return False
        self._sent_at = now
        self._tokens_sent = tokens
        self._due_at = now + QUIET_SECONDS
        return True

    # -- contributions of others ----------------------------------------------------------------------

    def relay(self, reference: Reference, peers: Iterable[PeerId], now: float) -> None:
        """Schedule the announcement of a contribution that arrived to the neighbours that may lack it."""
        for peer in peers:
            self._relays.setdefault(peer, {})[reference.id] = reference
            self._relay_at = min(self._relay_at, now + RELAY_SECONDS)

    def knows(self, peer: PeerId, references: Iterable[Reference]) -> None:
        """Cancel announcements to a neighbour that has announced the same contributions itself."""
        waiting = self._relays.get(peer)
        if waiting:
            for reference in references:
                waiting.pop(reference.id, None)

    def relays(self, same_branch_peers: Collection[PeerId], settled: int, now: float) -> list[SendAnnounce]:
        """Return all scheduled announcements if they are due, and clear the schedule; before that, none.

        Rounds up to `settled` are left out, and so are peers that are not in `same_branch_peers`."""
        if now < self._relay_at:
            return []
        due = self._relays
        self._relays = {}
        self._relay_at = float("inf")
        announcements = []
        for peer, waiting in due.items():
            references = tuple(entry for entry in waiting.values() if entry.round > settled)
            if references and peer in same_branch_peers:
                announcements.append(SendAnnounce((peer,), references))
        return announcements

    # -- lost announcements ---------------------------------------------------------------------------

    def compared(self, neighbour: NeighbourView) -> None:
        """Schedule requests for ids where the sets of a neighbour differ from this peer's."""
        self._differing_until = min(self._differing_until, neighbour.next_deadline())

    def id_requests(
        self, neighbours: Mapping[PeerId, NeighbourView], under_way: Callable[[int], bool], now: float
    ) -> list[RequestIds]:
        """Return requests for ids where a neighbour's set has differed for some time: an announcement was
        lost. Rounds with downloads `under_way` are left out."""
        if now < self._differing_until:
            return []
        due = {peer: view.due(now, under_way) for peer, view in neighbours.items()}
        deadlines = (view.next_deadline() for view in neighbours.values())
        self._differing_until = min(deadlines, default=float("inf"))
        return [RequestIds(peer, rounds) for peer, rounds in due.items() if rounds]

    def next_deadline(self) -> float:
        return min(self._due_at, self._relay_at, self._differing_until)
