"""Sum the tokens that peers claim in their records to have contributed, across restarts and moves.

A record is a peer's signed announcement, renewed regularly. Its token count starts at 0 again when the peer
restarts or moves to another stage. Nothing proves these counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import RECORD_SECONDS

MAX_KEPT = 8192
"""Maximum number of (peer, stage) entries; beyond it the smallest are forgotten."""

Key = tuple[str, int]
"""Peer and stage."""


class NewestClaim(NamedTuple):
    """What a peer's newest record claimed. The next one is compared with it."""

    stage: int
    started: int
    """Start of the peer's process, as in `PeerRecord.started`."""
    tokens: int
    joules: int
    at: float
    """Unix time in seconds at which it was signed."""


class ContributorTotal(msgspec.Struct, frozen=True):
    """All that is known of one peer's contributions, as it is kept on disk."""

    peer: str
    name: str
    tokens: dict[int, int]
    """Stage -> tokens."""
    seconds: float
    """Time in which its tokens grew."""
    joules: int
    newest: NewestClaim | None


@dataclass(slots=True)
class Contributions:
    """Tokens whose gradients peers claim to have committed."""

    tokens: Counter[Key] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    joules: Counter[str] = field(default_factory=Counter)
    """Energy in joules by peer, as its device measured it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by peer in which its tokens grew from one record to the next, as far as its records were read."""
    newest: dict[str, NewestClaim] = field(default_factory=dict)

    def add(self, record: PeerRecord, at: float) -> int:
        """Add what a peer's record, signed at `at`, claims beyond its newest record so far. Returns the
        number of new tokens. After a move or restart, counts begin at 0 again, and all of the record is new.
        Without an earlier record, some of its tokens may have been counted before it was forgotten: the
        larger of both counts is kept."""
        peer, key = record.peer, (record.peer, record.stage)
        last = self.newest.get(peer)
        if last is None:
            new_tokens = max(0, record.tokens - self.tokens[key])
            new_joules = max(0, record.joules - self.joules[peer])
        elif (last.stage, last.started) == (record.stage, record.started) and record.tokens >= last.tokens:
            new_tokens = record.tokens - last.tokens
            new_joules = max(0, record.joules - last.joules)
        else:
            new_tokens, new_joules = record.tokens, record.joules
        if last is None and self.tokens[key] + new_tokens <= 0:
            return 0
        self.names[peer] = record.name
        self.joules[peer] += new_joules
        if new_tokens:
            self.tokens[key] += new_tokens
        if last is not None and new_tokens and 0 < at - last.at <= RECORD_SECONDS:
            self.seconds[peer] = self.seconds.get(peer, 0.0) + at - last.at
        self.newest[peer] = NewestClaim(record.stage, record.started, record.tokens, record.joules, at)
        self._forget_smallest()
        return new_tokens

    def _forget_smallest(self) -> None:
        """If there are more than `MAX_KEPT` entries, keep only the larger half."""
        if len(self.tokens) <= MAX_KEPT:
            return
        self.tokens = Counter(dict(self.tokens.most_common(MAX_KEPT // 2)))
        peers = {peer for peer, _ in self.tokens}
        self.names = {peer: name for peer, name in self.names.items() if peer in peers}
        self.joules = Counter({peer: count for peer, count in self.joules.items() if peer in peers})
        self.seconds = {peer: time for peer, time in self.seconds.items() if peer in peers}
        self.newest = {peer: claim for peer, claim in self.newest.items() if peer in peers}

    def of_stage(self, stage: int, most: int) -> int:
        """Return the sum of the tokens of a stage's peers, each at most `most`, which limits false claims."""
        return sum(min(tokens, most) for (_, held), tokens in self.tokens.items() if held == stage)

    def largest(self, count: int, most: int) -> list[tuple[str, str, int, float]]:
        """Return (peer, name, tokens, seconds) of the peers that claim most, over all stages."""
        peers: Counter[str] = Counter()
        for (peer, _), tokens in self.tokens.items():
            peers[peer] += min(tokens, most)
        return [
            (peer, self.names.get(peer, ""), tokens, self.seconds.get(peer, 0.0))
            for peer, tokens in peers.most_common(count)
        ]

    def totals(self) -> list[ContributorTotal]:
        """Return everything as plain data."""
        by_peer: dict[str, dict[int, int]] = {}
        for (peer, stage), tokens in self.tokens.items():
            by_peer.setdefault(peer, {})[stage] = tokens
        return [
            ContributorTotal(
                peer=peer,
                name=self.names.get(peer, ""),
                tokens=tokens,
                seconds=self.seconds.get(peer, 0.0),
                joules=self.joules[peer],
                newest=self.newest.get(peer),
            )
            for peer, tokens in by_peer.items()
        ]

    def restore(self, totals: Iterable[ContributorTotal]) -> None:
        """Restore what `totals` returned."""
        for total in totals:
            self.names[total.peer] = total.name
            self.joules[total.peer] = total.joules
            self.seconds[total.peer] = total.seconds
            self.tokens.update({(total.peer, stage): tokens for stage, tokens in total.tokens.items()})
            if total.newest is not None:
                self.newest[total.peer] = total.newest
        self._forget_smallest()
