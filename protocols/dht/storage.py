"""Decide which values a DHT node stores for others, and which it evicts when there is no space.

Keys are free to create. If old values always stayed, the first peer with many could lock out all others.
Here, a new value evicts one from the address range (swarmnet/membership/address_ranges.py) that stored most,
and within the range from the peer that stored most. Values of this node and records of linked peers are never
evicted. Orders and manifests have a separate limit that records cannot use up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random

from protocols.dht.stored_values import PEERS_PER_KEY, PLAIN
from protocols.errors import Malformed

STORAGE_LIMIT = 32 * 1024 * 1024
"""Maximum bytes stored for others; hivemind's storage has no limit."""
SHARED_LIMIT = 8 * 1024 * 1024
"""The part of it that is reserved for orders and manifests: 512 of the longest."""
RECORDS_PER_PEER = 16

Name = tuple[bytes, bytes]
"""Key and subkey in hivemind's form."""


@dataclass(frozen=True, slots=True)
class Storer:
    """The peer that stored a value, with its address range, which is empty if unknown."""

    range: str
    peer: str


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One stored value."""

    sequence: int
    expires: float
    size: int
    storer: Storer | None
    """The peer that stored it; None if it is this node."""


@dataclass(slots=True)
class _Share:
    """The values that one peer has stored, in the order of their last renewal."""

    size: int = 0
    names: dict[Name, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Room:
    """The stored values of one kind."""

    limit: int
    size: int = 0
    per_range: Counter[str] = field(default_factory=Counter)
    shares: dict[str, dict[str, _Share]] = field(default_factory=dict)
    """Maps range to peer to its share."""

    def count(self, name: Name, kept: StoredValue, sign: int) -> None:
        """Add a value (`sign` 1) or remove it (`sign` -1)."""
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
    """Accounts for the values in hivemind's storage."""

    def __init__(self, evict: Callable[[Name], None], firm: Callable[[], Collection[bytes]]) -> None:
        """Create the accounting. `evict` removes a value from hivemind's storage. `firm` returns the subkeys
        whose records are never evicted."""
        self._evict, self._firm = evict, firm
        self._kept: dict[Name, StoredValue] = {}
        self._rooms = {False: _Room(STORAGE_LIMIT - SHARED_LIMIT), True: _Room(SHARED_LIMIT)}
        """Limits by kind: True for values without subkey (orders and manifests), False for records."""
        self._per_key: dict[bytes, dict[Storer | None, set[bytes]]] = {}
        """Maps key to storer to the subkeys that it stored."""
        self._per_subkey: Counter[bytes] = Counter()
        self._chance = Random()
        self._swept = 0.0

    @property
    def kept_bytes(self) -> int:
        """Total bytes stored."""
        return sum(room.size for room in self._rooms.values())

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: Name) -> bool:
        return name in self._kept

    def bytes_of(self, key: bytes) -> int:
        """Return the bytes of all values under a key."""
        shares = self._per_key.get(key, {})
        return sum(self._kept[key, tag].size for tags in shares.values() for tag in tags)

    def get(self, name: Name) -> StoredValue | None:
        return self._kept.get(name)

    def put(self, name: Name, kept: StoredValue) -> None:
        """Store a value, replacing its old version or evicting others. Raises Malformed if there is still no
        space."""
        key, tag = name
        old = self._kept.get(name)
        if old is not None:
            self._forget(name)
        elif tag != PLAIN and self._per_subkey[tag] >= RECORDS_PER_PEER:
            raise Malformed(f"no room for more than {RECORDS_PER_PEER} records of a peer")
        else:
            while sum(map(len, self._per_key.get(key, {}).values())) >= PEERS_PER_KEY:
                self._drop(self._victim_of_key(key, kept.storer), "key")
        room = self._rooms[tag == PLAIN]
        while room.size + kept.size > room.limit:
            victim = self._victim_of_room(room, kept)
            if victim is None and old is not None:
                self._evict(name)
            self._drop(victim, "node")
        self._kept[name] = kept
        self._per_key.setdefault(key, {}).setdefault(kept.storer, set()).add(tag)
        self._per_subkey[tag] += 1
        room.count(name, kept, 1)

    def sweep(self, now: float) -> None:
        """Forget expired values. Does nothing if the last call was less than a second ago."""
        if now - self._swept > 1.0:
            self._swept = now
            for name in [name for name, kept in self._kept.items() if kept.expires < now]:
                self._forget(name)

    def _victim_of_key(self, key: bytes, newcomer: Storer | None) -> Name | None:
        """Return a random record of the storer that has most records under this key."""
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

    def _victim_of_room(self, room: _Room, newcomer: StoredValue) -> Name | None:
        """Return the least recently renewed value of the storer that has most bytes."""
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
        """Evict a value. Raises Malformed if there is none to evict."""
        if name is None:
            raise Malformed(f"no room for more records of this {whose}")
        self._forget(name)
        self._evict(name)

    def _forget(self, name: Name) -> None:
        """Remove a value from the accounting."""
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
