"""Sum the tokens that peers claim in their records to have contributed, across restarts and moves."""

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
        """Add the first record seen of a peer, or the first after it was forgotten. Its tokens may be counted
        already."""
        known = self.tokens[record.peer, record.stage]
        self._set(record, max(known, record.tokens), max(self.joules[record.peer], record.joules))

    def grown(self, old: PeerRecord, new: PeerRecord) -> int:
        """Add the next record of a peer, and return the number of new tokens. Counts restart at 0 after a
        move or restart."""
        same = old.stage == new.stage and new.tokens >= old.tokens
        grown = new.tokens - old.tokens if same else new.tokens
        taken = max(0, new.joules - old.joules) if same else new.joules
        self._set(new, self.tokens[new.peer, new.stage] + grown, self.joules[new.peer] + taken)
        return grown

    def _set(self, record: PeerRecord, tokens: int, joules: int) -> None:
        """Set a peer's counts, and forget the smaller half of all entries beyond `MAX_KEPT`."""
        if tokens <= 0:
            return
        self.names[record.peer] = record.name
        self.tokens[record.peer, record.stage] = tokens
        self.joules[record.peer] = joules
        if len(self.tokens) > MAX_KEPT:
            self.tokens = Counter(dict(self.tokens.most_common(MAX_KEPT // 2)))
            kept = {peer for peer, _ in self.tokens}
            self.names = {peer: name for peer, name in self.names.items() if peer in kept}
            self.joules = Counter({peer: count for peer, count in self.joules.items() if peer in kept})

    def of_stage(self, stage: int, most: int) -> int:
        """Return the sum over a stage, with each peer limited to `most`, so that one false claim cannot spoil
        it."""
        return sum(min(tokens, most) for (_, held), tokens in self.tokens.items() if held == stage)

    def largest(self, count: int, most: int) -> list[tuple[str, str, int]]:
        """Return (peer, name, tokens) of the peers that claim most, over all stages."""
        peers: Counter[str] = Counter()
        for (peer, _), tokens in self.tokens.items():
            peers[peer] += min(tokens, most)
        return [(peer, self.names.get(peer, ""), tokens) for peer, tokens in peers.most_common(count)]
