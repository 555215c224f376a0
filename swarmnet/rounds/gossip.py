"""What a peer tells its neighbours unasked, and when: how far it is, and which contributions it holds.

Both wait a little, so that what changes in bursts goes out in one message. Part of `GroupRounds`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import Reference, SendAnnounce

URGENT_SECONDS = 0.05
"""At most this often Progress is told when others wait for what changed; a commit takes about as long."""
CALM_SECONDS = 0.25
"""... and when a set grew: announcements have told that already, this is for what they missed."""
QUIET_SECONDS = 1.0
"""Progress is repeated this often even when nothing changed: it is the anti-entropy."""
RELAY_SECONDS = 0.02
"""Contributions of others are announced in bundles this far apart: in a group of hundreds one message each
would cost more than the contributions."""
SHARE_PARTS = 16
"""Own tokens are told when they grew by this part of a peer's share of the round: the group then closes a
round with 3 % too many at most, on average."""


class Gossip:
    """Times in seconds on the caller's clock."""

    def __init__(self, now: float) -> None:
        self._told_at = now
        self._due_at = now
        self._tokens_told = 0
        self._relays: dict[PeerId, dict[ContributionId, Reference]] = {}
        self._relay_at = float("inf")

    # -- Progress -------------------------------------------------------------------------------------

    def changed(self, within: float) -> None:
        """Something is to be told at most `within` seconds after the last time."""
        self._due_at = min(self._due_at, self._told_at + within)

    def at_once(self, now: float) -> None:
        self._due_at = min(self._due_at, now)

    def committed(self, tokens: int, share: int) -> None:
        """The round has `tokens` here now; `share` is what every peer of the group brings to a round."""
        if tokens >= self._tokens_told + max(1, share // SHARE_PARTS):
            self.changed(URGENT_SECONDS)

    def tells(self, tokens: int, now: float) -> bool:
        """Whether Progress is to be told now, which the caller then does."""
        if now < self._due_at:
            return False
        self._told_at, self._tokens_told = now, tokens
        self._due_at = now + QUIET_SECONDS
        return True

    # -- what others made -----------------------------------------------------------------------------

    def relay(self, reference: Reference, peers: Iterable[PeerId], now: float) -> None:
        """These neighbours may lack a contribution that came in."""
        for peer in peers:
            self._relays.setdefault(peer, {})[reference.id] = reference
            self._relay_at = min(self._relay_at, now + RELAY_SECONDS)

    def knows(self, peer: PeerId, references: Iterable[Reference]) -> None:
        """The neighbour has announced these itself."""
        waiting = self._relays.get(peer)
        if waiting:
            for reference in references:
                waiting.pop(reference.id, None)

    def relays(self, allies: Collection[PeerId], settled: int, now: float) -> list[SendAnnounce]:
        """The announcements that are due."""
        if now < self._relay_at:
            return []
        due, self._relays, self._relay_at = self._relays, {}, float("inf")
        announcements = []
        for peer, waiting in due.items():
            references = tuple(entry for entry in waiting.values() if entry.round > settled)
            if references and peer in allies:
                announcements.append(SendAnnounce((peer,), references))
        return announcements

    def next_deadline(self) -> float:
        return min(self._due_at, self._relay_at)
