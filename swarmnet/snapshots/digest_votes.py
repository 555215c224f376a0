"""What the peers of a group signed of their settled weights: who agrees, and whether this peer is wrong.

Peers with the same chain of settled sets have the same weights, to the bit. Where the chains are the same and
the weights are not, somebody's memory, disk or program has failed; a group can only tell whose by counting.
Where the chains differ the group's histories have parted, which rounds/history.py resolves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from swarmnet.identifiers import PeerId

ROUNDS_KEPT = 4
"""Statements kept of each peer: two checkpoints on disk and two snapshots in memory may need theirs."""

Root = tuple[int, bytes]
"""(round, digest of the settled weights after it)."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A peer's word on its settled weights after a round."""

    peer: PeerId
    round: int
    chain: bytes
    """The value of the chain of settled sets there (rounds/history.py)."""
    digest: bytes


class SettledDigests:
    """The newest statements of each peer. The caller limits the peers."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self._held: dict[PeerId, dict[int, Statement]] = {}

    def take(self, statement: Statement) -> tuple[Statement, ...]:
        """Keep it if it is news; which ones go for it. A later word on the same round replaces the earlier:
        histories may have been given up."""
        held = self._held.setdefault(statement.peer, {})
        gone = tuple(old for old in (held.get(statement.round),) if old not in (None, statement))
        held[statement.round] = statement
        oldest = min(held)
        if len(held) > ROUNDS_KEPT:
            gone += (held.pop(oldest),)
        return tuple(old for old in gone if old is not None)

    def peers(self) -> set[PeerId]:
        """The others of whom anything is kept."""
        return self._held.keys() - {self.me}

    def of_round(self, round: int) -> list[Statement]:
        return [held[round] for held in self._held.values() if round in held]

    def all(self) -> list[Statement]:
        """The newest first."""
        return sorted((s for held in self._held.values() for s in held.values()), key=lambda s: -s.round)

    def roots(self) -> dict[PeerId, frozenset[Root]]:
        """What each peer has put its name to."""
        return {
            peer: frozenset((s.round, s.digest) for s in held.values()) for peer, held in self._held.items()
        }

    def forget(self, peer: PeerId, after: int = -1) -> list[Statement]:
        """What a peer said of rounds after `after`."""
        held = self._held.get(peer, {})
        gone = [held.pop(round) for round in list(held) if round > after]
        if not held:
            self._held.pop(peer, None)
        return gone

    def against(self, round: int, group: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Those of the `group` who name other weights for the same chain as this peer, all of them the same,
        if they are more than half of those who spoke of it, this peer included. Else nobody: it is not known
        who is wrong."""
        mine = self._held.get(self.me, {}).get(round)
        if mine is None:
            return ()
        others = [s for s in self.of_round(round) if s.peer in group and s.chain == mine.chain]
        named = Counter(statement.digest for statement in others if statement.peer != self.me)
        if not named:
            return ()
        digest, most = max(named.items(), key=lambda entry: (entry[1], entry[0]))
        if digest == mine.digest or 2 * most <= 1 + named.total():
            return ()
        return tuple(statement.peer for statement in others if statement.digest == digest)

    def differing(self, round: int, group: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Those of the `group` who name other weights for the same chain, whoever is right."""
        mine = self._held.get(self.me, {}).get(round)
        return () if mine is None else tuple(
            s.peer for s in self.of_round(round)
            if s.peer in group and s.chain == mine.chain and s.digest != mine.digest
        )  # fmt: skip
