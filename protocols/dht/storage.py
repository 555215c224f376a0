"""Decide which values a DHT node stores for others, and which it evicts when there is no space.

A key holds one value without subkey (a manifest or an order), or records under subkeys. The subkey is a peer
or a run. A value is named by (key, subkey). Its storer is the peer that sent it here.

An attacker can create many peer identities. If old values always stayed, it could lock out all others. Here,
a new value evicts one from the address range (swarmnet/membership/address_ranges.py) that stored most,
and within the range from the peer that stored most. Values of this node and records of linked peers are never
evicted. Orders and manifests are one pool and records another, each with its own limit in bytes.
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
class _Pool:
    """The stored values of one kind, with a limit in bytes."""

    limit: int
    size: int = 0
    per_range: Counter[str] = field(default_factory=Counter)
    """Bytes stored by each address range."""
    shares: dict[str, dict[str, _Share]] = field(default_factory=dict)
    """Maps range to peer to its share."""

    def count(self, name: Name, value: StoredValue, sign: int) -> None:
        """Add a value to the sums (`sign` 1) or subtract it (-1). This node's values count only in `size`."""
        self.size += sign * value.size
        if value.storer is None:
            return
        range, peer = value.storer.range, value.storer.peer
        self.per_range[range] += sign * value.size
        share = self.shares.setdefault(range, {}).setdefault(peer, _Share())
        share.size += sign * value.size
        if sign > 0:
            share.names[name] = None
            return
        del share.names[name]
        if not share.names:
            del self.shares[range][peer]
        if not self.shares[range]:
            del self.shares[range], self.per_range[range]


class Storage:
    """Accounts for the values in hivemind's storage, which holds the bytes themselves."""

    def __init__(self, evict: Callable[[Name], None], protected: Callable[[], Collection[bytes]]) -> None:
        """Create the accounting. `evict` removes a value from hivemind's storage. `protected` returns the
        subkeys whose records are never evicted."""
        self._evict = evict
        self._protected_subkeys = protected
        self._values: dict[Name, StoredValue] = {}
        self._pools = {False: _Pool(STORAGE_LIMIT - SHARED_LIMIT), True: _Pool(SHARED_LIMIT)}
        """Limits by kind: True for values without subkey (orders and manifests), False for records."""
        self._per_key: dict[bytes, dict[Storer | None, set[bytes]]] = {}
        """Maps key to storer to the subkeys that it stored."""
        self._per_subkey: Counter[bytes] = Counter()
        self._random = Random()
        self._last_sweep = 0.0

    @property
    def kept_bytes(self) -> int:
        """Total bytes stored."""
        return sum(pool.size for pool in self._pools.values())

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: Name) -> bool:
        return name in self._values

    def bytes_of(self, key: bytes) -> int:
        """Return the bytes of all values under a key."""
        subkeys_per_storer = self._per_key.get(key, {})
        return sum(self._values[key, tag].size for tags in subkeys_per_storer.values() for tag in tags)

    def get(self, name: Name) -> StoredValue | None:
        return self._values.get(name)

    def put(self, name: Name, value: StoredValue) -> None:
        """Account for a new value or version, evicting others while the key or the pool is full. Raises
        Malformed if nothing may be evicted, or for too many records under one subkey."""
        key, tag = name
        old = self._values.get(name)
        if old is not None:
            self._forget(name)
        elif tag != PLAIN and self._per_subkey[tag] >= RECORDS_PER_PEER:
            raise Malformed(f"no room for more than {RECORDS_PER_PEER} records of a peer")
        else:  # A new value; while the key has too many, one of them is dropped.
            while sum(map(len, self._per_key.get(key, {}).values())) >= PEERS_PER_KEY:
                self._drop(self._choose_victim_under_key(key, value.storer), full_place="key")
        pool = self._pools[tag == PLAIN]
        while pool.size + value.size > pool.limit:
            victim = self._choose_victim_in_pool(pool, value)
            if victim is None and old is not None:
                self._evict(name)  # Nothing has room for the new version: hivemind drops the old one, too.
            self._drop(victim, full_place="node")  # Raises if there is no victim.
        self._values[name] = value
        self._per_key.setdefault(key, {}).setdefault(value.storer, set()).add(tag)
        self._per_subkey[tag] += 1
        pool.count(name, value, 1)

    def sweep(self, now: float) -> None:
        """Remove expired values from the accounting, at most once a second; hivemind drops them itself."""
        if now - self._last_sweep > 1.0:
            self._last_sweep = now
            for name in [name for name, value in self._values.items() if value.expires < now]:
                self._forget(name)

    def _choose_victim_under_key(self, key: bytes, newcomer: Storer | None) -> Name | None:
        """Return the name of the record to evict under a full key, or None if all are protected. The address
        range with most records loses one, and within it the storer with most; the record is random. Only
        records that may be evicted count, and the new one that `newcomer` wants to store."""
        protected_subkeys = frozenset(self._protected_subkeys())
        per_range = Counter[str]()
        evictable: dict[Storer, set[bytes]] = {}
        for storer, tags in self._per_key[key].items():
            evictable_tags = tags - protected_subkeys
            if storer is not None and evictable_tags:
                evictable[storer] = evictable_tags
                per_range[storer.range] += len(evictable_tags)
        if not evictable:
            return None
        if newcomer is not None and newcomer.range in per_range:
            per_range[newcomer.range] += 1
        range_max = max(per_range.values())
        candidates = [tags for storer, tags in evictable.items() if per_range[storer.range] == range_max]
        storer_max = max(map(len, candidates))
        tags_of_largest = [tag for tags in candidates if len(tags) == storer_max for tag in tags]
        return key, self._random.choice(tags_of_largest)

    def _choose_victim_in_pool(self, pool: _Pool, newcomer: StoredValue) -> Name | None:
        """Return the name of the value to evict from a full pool, or None if all are protected. The address
        range with most bytes loses one, and within it the storer with most: its least recently renewed value.
        The new value `newcomer` counts towards its range."""
        protected_subkeys = self._protected_subkeys()
        newcomer_range = newcomer.storer.range if newcomer.storer is not None else None

        def bytes_of_range(range: str) -> int:
            return pool.per_range[range] + (newcomer.size if range == newcomer_range else 0)

        for range in sorted(pool.per_range, key=bytes_of_range, reverse=True):
            for share in sorted(pool.shares[range].values(), key=lambda share: -share.size):
                for key, tag in share.names:  # In the order of their last renewal.
                    if tag not in protected_subkeys:
                        return key, tag
        return None

    def _drop(self, name: Name | None, full_place: str) -> None:
        """Evict a value. Raises Malformed if `name` is None; `full_place` names what is full."""
        if name is None:
            raise Malformed(f"no room for more records of this {full_place}")
        self._forget(name)
        self._evict(name)

    def _forget(self, name: Name) -> None:
        """Remove a value from the accounting."""
        key, tag = name
        value = self._values.pop(name)
        subkeys_per_storer = self._per_key[key]
        subkeys_per_storer[value.storer].discard(tag)
        if not subkeys_per_storer[value.storer]:
            del subkeys_per_storer[value.storer]
        if not subkeys_per_storer:
            del self._per_key[key]
        self._per_subkey[tag] -= 1
        if not self._per_subkey[tag]:
            del self._per_subkey[tag]
        self._pools[tag == PLAIN].count(name, value, -1)
