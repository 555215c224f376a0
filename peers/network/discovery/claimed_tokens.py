"""Sum the tokens that peers claim in their records to have contributed, across restarts and moves.

A record is a peer's signed announcement, renewed regularly. Its token count starts at 0 again when the peer
restarts or moves to another stage. Nothing proves these counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protocols.signed.peer_record import PeerRecord

MAX_KEPT = 8192
"""Maximum number of (peer, stage) entries; beyond it the smallest are forgotten."""

Key = tuple[str, int]
"""Peer and stage."""


@dataclass(slots=True)
class Contributions:
    """Tokens whose gradients peers claim to have committed."""

    tokens: Counter[Key] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    joules: Counter[str] = field(default_factory=Counter)
    """Energy in joules by peer, as its device measured it."""

    def first(self, record: PeerRecord) -> None:
        """Count a peer's record without an earlier one to compare with. Some of its tokens may have been
        counted before an earlier record was forgotten. The larger of both counts is therefore kept."""
        counted_tokens = self.tokens[record.peer, record.stage]
        counted_joules = self.joules[record.peer]
        self._set(record, max(counted_tokens, record.tokens), max(counted_joules, record.joules))

    def grown(self, old: PeerRecord, new: PeerRecord) -> int:
        """Add the increase from a peer's record `old` to its next one, `new`. Returns the number of new
        tokens. After a move or restart, counts begin at 0 again, and all of `new` is the increase."""
        continues = old.stage == new.stage and new.tokens >= old.tokens
        new_tokens = new.tokens - old.tokens if continues else new.tokens
        new_joules = max(0, new.joules - old.joules) if continues else new.joules
        self._set(new, self.tokens[new.peer, new.stage] + new_tokens, self.joules[new.peer] + new_joules)
        return new_tokens

    def _set(self, record: PeerRecord, tokens: int, joules: int) -> None:
        """Set a peer's counts. If there are more than `MAX_KEPT` entries, keep only the larger half."""
        if tokens <= 0:
            return
        self.names[record.peer] = record.name
        self.tokens[record.peer, record.stage] = tokens
        self.joules[record.peer] = joules
        if len(self.tokens) > MAX_KEPT:
            self.tokens = Counter(dict(self.tokens.most_common(MAX_KEPT // 2)))
            peers = {peer for peer, _ in self.tokens}
            self.names = {peer: name for peer, name in self.names.items() if peer in peers}
            self.joules = Counter({peer: count for peer, count in self.joules.items() if peer in peers})

    def of_stage(self, stage: int, most: int) -> int:
        """Return the sum of the tokens of a stage's peers, each at most `most`, which limits false claims."""
        return sum(min(tokens, most) for (_, held), tokens in self.tokens.items() if held == stage)

    def largest(self, count: int, most: int) -> list[tuple[str, str, int]]:
        """Return (peer, name, tokens) of the peers that claim most, over all stages."""
        peers: Counter[str] = Counter()
        for (peer, _), tokens in self.tokens.items():
            peers[peer] += min(tokens, most)
        return [(peer, self.names.get(peer, ""), tokens) for peer, tokens in peers.most_common(count)]
