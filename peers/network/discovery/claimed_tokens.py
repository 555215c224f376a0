"""Sum the tokens that peers claim in their records to have contributed, across restarts and moves.

A record is a peer's signed announcement, renewed regularly. Its token count starts at 0 again when the peer
restarts or moves to another stage. Nothing proves these counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from protocols.signed.peer_record import PeerRecord

MAX_KEPT = 8192
"""Maximum number of (peer, stage) entries; beyond it the smallest are forgotten."""

MAX_STAGE = 99_999
"""Largest stage number in a stored entry, as in the names of an archive's checkpoints."""
MAX_COUNT = (1 << 63) - 1
"""Largest stored count."""

Key = tuple[str, int]
"""Peer and stage."""
Claimed = tuple[int, int, int]
"""Stage, tokens and joules of one record."""


@dataclass(slots=True)
class Contributions:
    """Tokens whose gradients peers claim to have committed."""

    tokens: Counter[Key] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    joules: Counter[str] = field(default_factory=Counter)
    """Energy in joules by peer, as its device measured it."""

    newest: dict[str, Claimed] = field(default_factory=dict)
    """What each peer's newest counted record claims."""

    def first(self, record: PeerRecord) -> None:
        """Count a record whose peer was away, or this process. The growth since the newest record that was
        counted is added. If none is known, the larger of this record's and the stored count is kept."""
        before = self.newest.get(record.peer)
        if before is not None:
            self._grow(before, record)
            return
        counted_tokens = self.tokens[record.peer, record.stage]
        counted_joules = self.joules[record.peer]
        self._set(record, max(counted_tokens, record.tokens), max(counted_joules, record.joules))

    def grown(self, old: PeerRecord, new: PeerRecord) -> int:
        """Add the increase from a peer's record `old` to its next one, `new`. Returns the number of new
        tokens. After a move or restart, counts begin at 0 again, and all of `new` is the increase."""
        return self._grow((old.stage, old.tokens, old.joules), new)

    def _grow(self, old: Claimed, new: PeerRecord) -> int:
        stage, tokens, joules = old
        continues = stage == new.stage and new.tokens >= tokens
        new_tokens = new.tokens - tokens if continues else new.tokens
        new_joules = max(0, new.joules - joules) if continues else new.joules
        self._set(new, self.tokens[new.peer, new.stage] + new_tokens, self.joules[new.peer] + new_joules)
        return new_tokens

    def _set(self, record: PeerRecord, tokens: int, joules: int) -> None:
        """Set a peer's counts. If there are more than `MAX_KEPT` entries, keep only the larger half."""
        if tokens <= 0:
            return
        self.names[record.peer] = record.name
        self.tokens[record.peer, record.stage] = tokens
        self.joules[record.peer] = joules
        self.newest[record.peer] = (record.stage, record.tokens, record.joules)
        if len(self.tokens) > MAX_KEPT:
            self.tokens = Counter(dict(self.tokens.most_common(MAX_KEPT // 2)))
            peers = {peer for peer, _ in self.tokens}
            self.names = {peer: name for peer, name in self.names.items() if peer in peers}
            self.joules = Counter({peer: count for peer, count in self.joules.items() if peer in peers})
            self.newest = {peer: claimed for peer, claimed in self.newest.items() if peer in peers}

    def of_stage(self, stage: int, most: int) -> int:
        """Return the sum of the tokens of a stage's peers, each at most `most`, which limits false claims."""
        return sum(min(tokens, most) for (_, held), tokens in self.tokens.items() if held == stage)

    def largest(self, count: int, most: int) -> list[tuple[str, str, int]]:
        """Return (peer, name, tokens) of the peers that claim most, over all stages."""
        peers: Counter[str] = Counter()
        for (peer, _), tokens in self.tokens.items():
            peers[peer] += min(tokens, most)
        return [(peer, self.names.get(peer, ""), tokens) for peer, tokens in peers.most_common(count)]

    # -- stored entries -------------------------------------------------------------------------------

    def entries(self) -> Iterator[dict[str, object]]:
        """Yield an entry of plain data for each peer with tokens, to be stored as JSON."""
        stages: dict[str, dict[str, int]] = {}
        for (peer, stage), count in sorted(self.tokens.items()):
            stages.setdefault(peer, {})[str(stage)] = count
        for peer, counts in stages.items():
            yield {
                "peer": peer,
                "name": self.names.get(peer, ""),
                "tokens": counts,
                "joules": self.joules[peer],
                "newest": list(self.newest.get(peer, ())),
            }

    def restore(self, entry: Mapping[str, object]) -> str | None:
        """Restore a stored entry. Returns its peer; None if the entry is invalid. Invalid values in it are
        left out."""
        peer, name, tokens = entry.get("peer"), entry.get("name"), entry.get("tokens")
        if not isinstance(peer, str) or not isinstance(tokens, dict):
            return None
        for stage, count in tokens.items():
            if str(stage).isdecimal() and len(str(stage)) <= len(str(MAX_STAGE)) and _is_count(count):
                self.tokens[peer, int(stage)] = count
        self.names[peer] = name if isinstance(name, str) else ""
        joules, newest = entry.get("joules"), entry.get("newest")
        self.joules[peer] = joules if isinstance(joules, int) and _is_count(joules) else 0
        match newest:
            case [int(stage), int(last), int(energy)] if min(newest) >= 0 and max(newest) <= MAX_COUNT:
                self.newest[peer] = (stage, last, energy)
        return peer


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 < value <= MAX_COUNT
