"""Collects signed digests of settled weights, and decides whether this peer's weights are wrong.

A *chain value* is a hash over all settled rounds. Peers with the same chain value after a round have
bit-identical weights. If the values are equal and the weights are not, a memory, disk or program has failed,
and only a majority can show whose. If the values differ, the group has forked, which rounds/history.py
resolves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from swarmnet.identifiers import PeerId

ROUNDS_KEPT = 4
"""Statements kept of each peer. Two checkpoints on disk and two snapshots in memory may need theirs."""

Root = tuple[int, bytes]
"""(round, digest of the settled weights after it)."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A peer's signed statement about its settled weights after a round."""

    peer: PeerId
    round: int
    chain: bytes
    """The chain value after the round (rounds/history.py)."""
    digest: bytes


class SettledDigests:
    """The newest statements of each peer. The caller limits the number of peers."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self._held: dict[PeerId, dict[int, Statement]] = {}

    def take(self, statement: Statement) -> tuple[Statement, ...]:
        """Store a statement. Returns the statements that are no longer kept, at most two.

        It replaces another one of the same peer about the same round: the peer may have switched branches. If
        the peer then has more than `ROUNDS_KEPT`, the one about the oldest round is dropped."""
        held = self._held.setdefault(statement.peer, {})
        earlier = held.get(statement.round)
        dropped = [] if earlier is None or earlier == statement else [earlier]
        held[statement.round] = statement
        if len(held) > ROUNDS_KEPT:
            dropped.append(held.pop(min(held)))
        return tuple(dropped)

    def peers(self) -> set[PeerId]:
        """Return the other peers that have statements here."""
        return self._held.keys() - {self.me}

    def of_round(self, round: int) -> list[Statement]:
        return [held[round] for held in self._held.values() if round in held]

    def all(self) -> list[Statement]:
        """Return all statements, the newest first."""
        return sorted((s for held in self._held.values() for s in held.values()), key=lambda s: -s.round)

    def roots(self) -> dict[PeerId, frozenset[Root]]:
        """Return the roots that each peer has signed."""
        return {
            peer: frozenset((s.round, s.digest) for s in held.values()) for peer, held in self._held.items()
        }

    def forget(self, peer: PeerId, after: int = -1) -> list[Statement]:
        """Remove and return a peer's statements about rounds after `after`; all by default."""
        held = self._held.get(peer, {})
        removed = [held.pop(round) for round in list(held) if round > after]
        if not held:
            self._held.pop(peer, None)
        return removed

    def against(self, round: int, group: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Return the majority of `group` that contradicts this peer: peers that signed one other digest for
        the same round and chain value. Empty if there is none, or if this peer has signed none itself.

        They must be more than half of the peers with a statement about that round and chain, this peer
        included. Otherwise it is unknown which weights are wrong."""
        mine = self._held.get(self.me, {}).get(round)
        if mine is None:
            return ()
        comparable = [s for s in self.of_round(round) if s.peer in group and s.chain == mine.chain]
        votes = Counter(statement.digest for statement in comparable if statement.peer != self.me)
        if not votes:
            return ()
        digest, most = max(votes.items(), key=lambda entry: (entry[1], entry[0]))
        has_majority = 2 * most > 1 + votes.total()
        if digest == mine.digest or not has_majority:
            return ()
        return tuple(statement.peer for statement in comparable if statement.digest == digest)

    def differing(self, round: int, group: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Return the peers of `group` that signed another digest than this peer for the same round and chain
        value, majority or not. Empty if this peer has signed none."""
        mine = self._held.get(self.me, {}).get(round)
        if mine is None:
            return ()
        comparable = [s for s in self.of_round(round) if s.peer in group and s.chain == mine.chain]
        return tuple(s.peer for s in comparable if s.digest != mine.digest)
