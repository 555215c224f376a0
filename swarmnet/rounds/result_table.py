"""Results of reducers: their wire format, and which results have weight where they overlap.

In a run with `sync.topology: sharded-reduce`, a contributor cuts its contribution to a round into `shards`
slices and sends each to one *reducer*. A reducer sums the slices of its shards and publishes the sums as one
*result*. The set of a round then consists of results. Each result begins with a *head*: a table, which says
whose slices are in the sums, and a hash of the sums.

    contributors u16 | for each: peer 16 B, contribution 16 B, tokens u32, grant 96 B | shards u16
                     | for each: shard u16, one bit for each contributor
                     | SHA-256 of the sums, first 16 B | sums                             (big-endian)

A table has one valid form: contributors and shards are sorted and unique, and every contributor is in some
shard. A *grant* is a contributor's public key and its signature (protocols/signed/grants.py). It permits one
reducer to sum the slices of exactly these shards, so a reducer cannot name a peer that sent it no slices.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.run.manifest import Manifest

TAG_BYTES = 16
"""Length of a peer's tag in a table. Two keys with the same 16 bytes cost 2^64 hashes. With 8 bytes they cost
2^32, which is minutes on a GPU, and no reducer can publish a table that names both."""
GRANT_BYTES = 96
"""Length of a grant: a public key of 32 bytes and an Ed25519 signature of 64."""
NO_GRANT = bytes(GRANT_BYTES)
"""Placeholder where the grant does not matter: in simulations without signatures, and for contributors
computed from evidence. No key verifies it."""
NAME_BYTES = 16
"""Length of a contribution's id in a table: the whole id. With half of it, a peer could make two
contributions of one name (2^32 hashes). One would go to the reducer, and the other seem to prove wrong sums
(audits.py)."""
DIGEST_BYTES = 16
MAX_CONTRIBUTORS = 1024
WORKERS_SHARD = 0
"""The shard that helpers never reduce. Its result shows how many peers contributed. If a helper leaves most
of them out, its own result is then too small to count, even if it reduces all other shards."""
UPLINK_LEVELS = (5_000_000, 20_000_000, 80_000_000)
"""Uploads in bytes per second from which a peer is drawn as a reducer twice as often as below. A peer that
claims any upload is therefore drawn at most eight times as often as one that claims none."""
_HASH_BITS = 256
_COUNT = struct.Struct(">H")
_CONTRIBUTOR = struct.Struct(f">{TAG_BYTES}s{NAME_BYTES}sI{GRANT_BYTES}s")
MAX_TOKENS = (1 << 32) - 1


class ContributionError(ValueError):
    """A contribution or result that no honest peer of this run can have sent. The message says why."""


@lru_cache(4096)
def tag_of(peer: PeerId) -> bytes:
    """Return the 16 bytes by which tables name a peer."""
    return hashlib.sha256(peer.encode()).digest()[:TAG_BYTES]


TagKey = tuple[int, ...]


def tag_key(tag: bytes) -> TagKey:
    """Return a peer's tag as four numbers of 30 bits, which floats of a checkpoint hold exactly."""
    return tuple(number >> 2 for number in struct.unpack(">4I", tag))


@dataclass(frozen=True, slots=True, order=True)
class Contributor:
    """A peer whose slices are in a result."""

    peer: bytes
    """The peer's tag (`tag_of`)."""
    contribution: bytes
    """The id of its contribution."""
    tokens: int
    """Tokens of the contribution in all shards, as its contributor reports them."""
    grant: bytes = field(default=NO_GRANT, compare=False, repr=False)
    """Its public key and signature for the reducer. The grant does not identify the contributor."""

    @classmethod
    def of(cls, peer: PeerId, identity: ContributionId, tokens: int, grant: bytes = NO_GRANT) -> Contributor:
        """Return the table entry of a peer and its contribution. `tokens` is clamped to 32 bits."""
        return cls(tag_of(peer), identity[:NAME_BYTES], min(max(0, tokens), MAX_TOKENS), grant)

    def made(self, identity: ContributionId) -> bool:
        """Return whether this entry is the one of the contribution `identity`."""
        return self.contribution == identity[:NAME_BYTES]


@dataclass(frozen=True, slots=True)
class Table:
    """The contributors in each shard of one result."""

    shards: Mapping[int, frozenset[Contributor]]
    """Shard -> contributors whose slices were summed. No shard is empty."""

    @property
    def contributors(self) -> tuple[Contributor, ...]:
        """All contributors of the table, sorted, each once."""
        return tuple(sorted({entry for held in self.shards.values() for entry in held}))

    def tokens(self, shards: int) -> int:
        """Return the tokens of the result, in a run with that number of shards. Each contributor counts by
        the share of its slices that are in the result."""
        return sum(entry.tokens for held in self.shards.values() for entry in held) // shards

    def shards_of(self) -> dict[Contributor, frozenset[int]]:
        """Return contributor -> the shards that include a slice of it, in the table's order."""
        by_contributor: dict[Contributor, set[int]] = {entry: set() for entry in self.contributors}
        for shard, held in self.shards.items():
            for entry in held:
                by_contributor[entry].add(shard)
        return {entry: frozenset(shards) for entry, shards in by_contributor.items()}

    def holding(self, identity: ContributionId) -> frozenset[int]:
        """Return the shards whose sums include a slice of the contribution `identity`."""
        return frozenset(
            shard for shard, held in self.shards.items() if any(entry.made(identity) for entry in held)
        )

    def written(self) -> bytes:
        """Return the table in its wire format (top of this module)."""
        contributors = self.contributors
        parts = [_COUNT.pack(len(contributors))]
        for entry in contributors:
            parts.append(_CONTRIBUTOR.pack(entry.peer, entry.contribution, entry.tokens, entry.grant))
        parts.append(_COUNT.pack(len(self.shards)))
        for shard, held in sorted(self.shards.items()):
            # Bit i is set if contributor i of the table is in the shard.
            mask = sum(1 << index for index, entry in enumerate(contributors) if entry in held)
            parts += [_COUNT.pack(shard), mask.to_bytes(_mask_bytes(len(contributors)), "little")]
        return b"".join(parts)


def longest_head(shards: int, contributors: int = MAX_CONTRIBUTORS) -> int:
    """Return the greatest length of a result's head in bytes, with so many shards and contributors."""
    each = _COUNT.size + _mask_bytes(contributors)
    return 2 * _COUNT.size + contributors * _CONTRIBUTOR.size + shards * each + DIGEST_BYTES


def head_of(table: Table, sums: bytes) -> bytes:
    """Return the head of a result: the table and a hash of the sums. Its reducer signs the head alone."""
    return table.written() + hashlib.sha256(sums).digest()[:DIGEST_BYTES]


def read_head(result: bytes, shards: int) -> tuple[Table, int]:
    """Return the table of a result, and the length of its head in bytes. Raises `ContributionError` if the
    head is malformed or incomplete. The hash in it is not compared with the sums."""
    table, length = read_table(result, shards)
    if len(result) < length + DIGEST_BYTES:
        raise ContributionError(f"{len(result)} bytes are too few for a result's head")
    return table, length + DIGEST_BYTES


def read_result(result: bytes, shards: int) -> tuple[Table, memoryview]:
    """Return the table and sums of a result. Raises `ContributionError` if its head is malformed, or if the
    sums do not match the hash in it."""
    table, start = read_head(result, shards)
    sums = memoryview(result)[start:]
    if hashlib.sha256(sums).digest()[:DIGEST_BYTES] != result[start - DIGEST_BYTES : start]:
        raise ContributionError("the sums do not match the hash in the head of the result")
    return table, sums


def read_table(data: bytes | memoryview, shards: int) -> tuple[Table, int]:
    """Return the table at the beginning of a result and its length in bytes, for a run with `shards` shards.
    Raises `ContributionError` if the table is malformed or not in its one valid form."""
    try:
        (count,) = _COUNT.unpack_from(data)
        end = _COUNT.size + count * _CONTRIBUTOR.size
        contributors = [Contributor(*fields) for fields in _CONTRIBUTOR.iter_unpack(data[_COUNT.size : end])]
        (shard_count,) = _COUNT.unpack_from(data, end)
    except struct.error:
        raise ContributionError(f"{len(data)} bytes are too few for a result's table") from None
    if count > MAX_CONTRIBUTORS or not 0 < shard_count <= shards:
        raise ContributionError(f"the result names {count} contributors in {shard_count} of {shards} shards")
    start, entry_bytes = end + _COUNT.size, _COUNT.size + _mask_bytes(count)
    length = start + shard_count * entry_bytes
    if len(data) < length:
        raise ContributionError(f"{len(data)} bytes are too few for a table of {length}")
    by_shard: dict[int, frozenset[Contributor]] = {}
    for offset in range(start, length, entry_bytes):
        (shard,) = _COUNT.unpack_from(data, offset)
        mask = int.from_bytes(data[offset + _COUNT.size : offset + entry_bytes], "little")
        if mask >> count or not mask:  # A bit of no contributor is set, or none.
            raise ContributionError(f"shard {shard} names no contributor, or more than the table's {count}")
        by_shard[shard] = frozenset(entry for index, entry in enumerate(contributors) if mask >> index & 1)
    table = Table(by_shard)
    tags = {entry.peer for entry in contributors}
    if len(by_shard) != shard_count or max(by_shard) >= shards or len(tags) != count:
        raise ContributionError("a shard or a contributor is named twice, or a shard does not exist")
    if table.written() != data[:length]:
        raise ContributionError("the table is not sorted, or a contributor is in no shard")
    return table, length


def counting(tables: Mapping[PeerId, Table], draw: Draw, round: int) -> dict[int, tuple[PeerId, ...]]:
    """Return shard -> the reducers whose results have weight in it, the largest result first. `tables` maps
    each reducer of the round to the table of its result.

    A result with fewer than half as many contributors in a shard as the round's largest in any shard has no
    weight there. If results share a contributor, the one with more contributors wins; `Draw.rank` decides
    between equally large ones. The outcome depends only on a round's set, so all peers compute the same."""
    sizes = [len(held) for table in tables.values() for held in table.shards.values()]
    largest = max(sizes, default=0)
    with_weight: dict[int, tuple[PeerId, ...]] = {}
    for shard in sorted({shard for table in tables.values() for shard in table.shards}):
        large = {
            reducer: table.shards[shard]
            for reducer, table in tables.items()
            if 2 * len(table.shards.get(shard, ())) >= largest
        }
        counted_peers: set[bytes] = set()
        chosen: list[PeerId] = []
        for reducer in sorted(large, key=lambda peer: (-len(large[peer]), draw.rank(round, shard, peer))):
            peers = {entry.peer for entry in large[reducer]}
            if not counted_peers & peers:  # No contributor is in a larger result already.
                counted_peers |= peers
                chosen.append(reducer)
        with_weight[shard] = tuple(chosen)
    return with_weight


@dataclass(frozen=True, slots=True)
class ReducerClass:
    """What a group knows of a peer as a reducer."""

    level: int = 0
    """Its upload, as the number of `UPLINK_LEVELS` that it reaches."""
    is_helper: bool = False
    """True if it only reduces, and does not train, and its upload is not known to be slow. Helpers reduce
    before all others."""


NO_CLASS = ReducerClass()


def class_of(claimed: float, measured: float, is_helper: bool) -> ReducerClass:
    """Return the class of a peer that claims one upload (0 if none), where others measured another (infinite
    if none). A helper that was measured below the lowest level is drawn like a worker, because all peers
    would wait for it in each round."""
    level = sum(min(claimed, measured) >= least for least in UPLINK_LEVELS)
    return ReducerClass(level, is_helper and measured >= UPLINK_LEVELS[0])


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws the reducer of each shard, anew for every block of rounds.

    Each shard is drawn independently by weighted rendezvous hashing (Thaler and Ravishankar 1998). A peer
    that joins or leaves therefore changes few draws, and peers that know the same members draw the same.

    A block's draw depends on a chain value: a hash over all rounds settled until shortly before the block
    (history.py). This value becomes known only when the block begins. No peer can therefore try out keys
    beforehand until one of them is drawn. Ties between results depend on the run's id and the round alone:
    peers that know only a settled set must break them alike."""

    seed: bytes
    """The run id, as bytes."""
    block_rounds: int
    shards: int
    window: int
    """`window` of the run's rounds."""

    def seed_round(self, round: int) -> int:
        """Return the round whose chain value is the seed of this round's block. A negative number means that
        the seed is `START` (history.py)."""
        return self.first_round(round) - self.window - 1

    def first_round(self, round: int) -> int:
        """Return the first round of this round's block."""
        return round - round % self.block_rounds

    def rank(self, round: int, shard: int, contributor: PeerId) -> bytes:
        """Return the key that decides between equally large results: the smallest wins."""
        return _place(self.seed, b"", round, shard, contributor)

    def place(self, round: int, shard: int, peer: PeerId, value: bytes) -> bytes:
        """Return a peer's position in the draw of a shard: a hash, and the smallest wins. `value` is the
        chain value after round `seed_round(round)`."""
        return _place(self.seed, value, round // self.block_rounds, shard, peer)

    def reducers(
        self,
        round: int,
        peers: Iterable[PeerId],
        value: bytes,
        classes: Mapping[PeerId, ReducerClass] = MappingProxyType({}),
    ) -> tuple[PeerId, ...]:
        """Return the reducer of each shard, in the order of the shards. All rounds of this round's block have
        the same reducers.

        Helpers reduce all shards but `WORKERS_SHARD`, and the others reduce the rest. Among peers of one
        level the smallest `place` (a hash) is drawn. A peer of level k is drawn 2^k times as often as one of
        level 0. `value` is the chain value, a hash over all settled rounds, after round `seed_round(round)`.
        """
        known = tuple(peers)
        helpers = tuple(peer for peer in known if classes.get(peer, NO_CLASS).is_helper)
        workers = tuple(peer for peer in known if peer not in helpers)

        def draw_one(shard: int) -> PeerId:
            def score(peer: PeerId) -> int:
                place = self.place(round, shard, peer, value)
                return _weighted(place, classes.get(peer, NO_CLASS).level)

            return max((workers if shard == WORKERS_SHARD else helpers) or known, key=score)

        return tuple(draw_one(shard) for shard in range(self.shards))


def draw_of(manifest: Manifest) -> Draw:
    rules = manifest.rounds
    return Draw(bytes.fromhex(manifest.run_id()), rules.snapshot_interval, manifest.sync.shards, rules.window)


@lru_cache(1 << 16)
def _place(seed: bytes, value: bytes, number: int, shard: int, peer: PeerId) -> bytes:
    return hashlib.sha256(seed + value + f"\n{number}\n{shard}\n{peer}".encode()).digest()


@lru_cache(1 << 16)
def _weighted(place: bytes, level: int) -> int:
    """Return the position of a peer in a draw in which the greatest wins. The peer has 2^level chances.

    The best of w chances is distributed as the w-th root of one. Roots are compared exactly, by powers: level
    0 has the power 2^(number of levels), the highest level the power 1."""
    chance = (1 << _HASH_BITS) - int.from_bytes(place, "big")
    power = 1 << (len(UPLINK_LEVELS) - level)
    return int(chance**power) << _HASH_BITS * ((1 << len(UPLINK_LEVELS)) - power)


def _mask_bytes(contributors: int) -> int:
    """Return the bytes of a bit mask over that number of contributors."""
    return -(-contributors // 8)
