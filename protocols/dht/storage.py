"""What a node of the directory keeps for others, and what goes when there is no room for more.

Keys are free, so first come, first kept means that whoever comes first with many shuts all others out. Here
the new takes the place of something from the address range (swarmnet/membership/address_ranges.py) from which
most was stored, and there of the peer that stored most. What this node stores itself, and what those sign to
whom it is linked, never goes. Orders and manifests have room of their own: no record takes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random

from protocols.dht.stored_values import PEERS_PER_KEY, PLAIN
from protocols.errors import Malformed

STORAGE_LIMIT = 32 * 1024 * 1024
"""Bytes kept for others; hivemind's storage has no limit."""
SHARED_LIMIT = 8 * 1024 * 1024
"""Of these, for orders and manifests alone: 512 of the longest."""
RECORDS_PER_PEER = 16

Name = tuple[bytes, bytes]
"""Key and subkey, as hivemind has them."""


@dataclass(frozen=True, slots=True)
class Storer:
    """Who stored a value: its address range, empty where that is not known, and its peer id."""

    range: str
    peer: str


@dataclass(frozen=True, slots=True)
class Kept:
    """One value that is kept."""

    sequence: int
    expires: float
    size: int
    storer: Storer | None
    """None: this node itself."""


@dataclass(slots=True)
class _Share:
    """What one peer has stored: names in the order in which they were renewed."""

    size: int = 0
    names: dict[Name, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Room:
    """What is kept of one kind."""

    limit: int
    size: int = 0
    per_range: Counter[str] = field(default_factory=Counter)
    shares: dict[str, dict[str, _Share]] = field(default_factory=dict)
    """Range -> peer -> its share."""

    def count(self, name: Name, kept: Kept, sign: int) -> None:
        """Add (1) or take away (-1) a value."""
        self.size += sign * kept.size
        if kept.storer is None:
            return
        range, peer = kept.storer.range, kept.storer.peer
        self.per_range[range] += sign * kept.size
        share = self.shares.setdefault(range, {}).setdefault(peer, _Share())
        share.size += sign * kept.size
        if sign > 0:
            share.names[name] = None
            return
        del share.names[name]
        if not share.names:
            del self.shares[range][peer]
        if not self.shares[range]:
            del self.shares[range], self.per_range[range]


class Storage:
    """The account of hivemind's storage."""

    def __init__(self, evict: Callable[[Name], None], firm: Callable[[], Collection[bytes]]) -> None:
        """`evict` takes a value out of hivemind's storage; `firm`: subkeys whose records never go."""
        self._evict, self._firm = evict, firm
        self._kept: dict[Name, Kept] = {}
        self._rooms = {False: _Room(STORAGE_LIMIT - SHARED_LIMIT), True: _Room(SHARED_LIMIT)}
        """By whether they have no subkey."""
        self._per_key: dict[bytes, dict[Storer | None, set[bytes]]] = {}
        """Key -> who stored -> subkeys."""
        self._per_subkey: Counter[bytes] = Counter()
        self._chance = Random()
        self._swept = 0.0

    @property
    def kept_bytes(self) -> int:
        return sum(room.size for room in self._rooms.values())

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: Name) -> bool:
        return name in self._kept

    def bytes_of(self, key: bytes) -> int:
        """Bytes of all values under a key."""
        shares = self._per_key.get(key, {})
        return sum(self._kept[key, tag].size for tags in shares.values() for tag in tags)

    def get(self, name: Name) -> Kept | None:
        return self._kept.get(name)

    def put(self, name: Name, kept: Kept) -> None:
        """Keep it in the place of what stands there, or of others. Malformed if there is no room even so."""
        key, tag = name
        old = self._kept.get(name)
        if old is not None:
            self._forget(name)
        elif tag != PLAIN and self._per_subkey[tag] >= RECORDS_PER_PEER:
            raise Malformed(f"no room for more than {RECORDS_PER_PEER} records of a peer")
        else:
            while sum(map(len, self._per_key.get(key, {}).values())) >= PEERS_PER_KEY:
                self._drop(self._of_key(key, kept.storer), "key")
        room = self._rooms[tag == PLAIN]
        while room.size + kept.size > room.limit:
            victim = self._of_room(room, kept)
            if victim is None and old is not None:
                self._evict(name)
            self._drop(victim, "node")
        self._kept[name] = kept
        self._per_key.setdefault(key, {}).setdefault(kept.storer, set()).add(tag)
        self._per_subkey[tag] += 1
        room.count(name, kept, 1)

    def sweep(self, now: float) -> None:
        """Forget what has expired; at most once a second."""
        if now - self._swept > 1.0:
            self._swept = now
            for name in [name for name, kept in self._kept.items() if kept.expires < now]:
                self._forget(name)

    def _of_key(self, key: bytes, newcomer: Storer | None) -> Name | None:
        """One at random of the storer that has most records of this key."""
        firm, ranges = frozenset(self._firm()), Counter[str]()
        shares: dict[Storer, set[bytes]] = {}
        for storer, tags in self._per_key[key].items():
            if storer is not None and (left := tags - firm):
                shares[storer] = left
                ranges[storer.range] += len(left)
        if not shares:
            return None
        if newcomer is not None:
            ranges[newcomer.range] += newcomer.range in ranges
        most = max(ranges.values())
        fullest = [tags for storer, tags in shares.items() if ranges[storer.range] == most]
        most = max(map(len, fullest))
        return key, self._chance.choice([tag for tags in fullest if len(tags) == most for tag in tags])

    def _of_room(self, room: _Room, newcomer: Kept) -> Name | None:
        """The least recently renewed one of the storer that has most bytes."""
        firm = self._firm()
        own = newcomer.storer.range if newcomer.storer is not None else None

        def weight(range: str) -> int:
            return room.per_range[range] + (newcomer.size if range == own else 0)

        for range in sorted(room.per_range, key=weight, reverse=True):
            for share in sorted(room.shares[range].values(), key=lambda share: -share.size):
                for name in share.names:
                    if name[1] not in firm:
                        return name
        return None

    def _drop(self, name: Name | None, whose: str) -> None:
        if name is None:
            raise Malformed(f"no room for more records of this {whose}")
        self._forget(name)
        self._evict(name)

    def _forget(self, name: Name) -> None:
        kept = self._kept.pop(name)
        shares = self._per_key[name[0]]
        shares[kept.storer].discard(name[1])
        if not shares[kept.storer]:
            del shares[kept.storer]
        if not shares:
            del self._per_key[name[0]]
        self._per_subkey[name[1]] -= 1
        if not self._per_subkey[name[1]]:
            del self._per_subkey[name[1]]
        self._rooms[name[1] == PLAIN].count(name, kept, -1)
