"""What a round's results hold: who is in which shard of them, and which results count where they overlap.

In a run with `sync.exchange: sharded` a contributor cuts what it has to say of a round into `shards` slices
and sends each to one *reducer*, who adds up those of its shards and publishes the sums as one *result*.
Results are what a round's set consists of. A table stands at the head of each, and names the sums that
follow:

    contributors u16 | for each: peer 16 B, contribution 16 B, tokens u32, grant 96 B | shards u16
                     | for each: shard u16, one bit for each contributor
                     | SHA-256 of the sums, first 16 B | sums                             (big-endian)

sorted, each once, and nobody in it who is in none of its shards: a table has one valid form. A *grant* is a
contributor's public key and its signature (protocols/signed/grants.py): it lets one reducer add up the slices
of exactly these shards, so a reducer can name no peer that did not send it slices.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.run.manifest import Manifest

TAG_BYTES = 16
"""Of a peer in a table: two keys with the same 16 bytes cost 2^64 hashes. With 8 bytes they cost 2^32, which
is minutes on a GPU, and no reducer can publish a table that names both."""
GRANT_BYTES = 96
"""A public key of 32 bytes and a signature of 64 (Ed25519)."""
NO_GRANT = bytes(GRANT_BYTES)
"""Of a contributor whose grant does not matter: in simulations without signatures, and where a contributor is
computed from evidence. No key verifies it."""
NAME_BYTES = 16
"""Of a contribution's id, all of it. By half of it somebody could make two of one name (2^32 hashes), give a
reducer the one and show the other as proof that its sums are false (audits.py)."""
DIGEST_BYTES = 16
MOST_CONTRIBUTORS = 1024
_COUNT = struct.Struct(">H")
_CONTRIBUTOR = struct.Struct(f">{TAG_BYTES}s{NAME_BYTES}sI{GRANT_BYTES}s")
MOST_TOKENS = (1 << 32) - 1


class ContributionError(ValueError):
    """A payload that no honest peer of this run can have sent, contribution or result; the message says
    why."""


@lru_cache(4096)
def tag_of(peer: PeerId) -> bytes:
    """Return the 16 bytes by which tables name a peer."""
    return hashlib.sha256(peer.encode()).digest()[:TAG_BYTES]


@dataclass(frozen=True, slots=True, order=True)
class Contributor:
    """Somebody whose slices are in a result."""

    peer: bytes
    """As `tag_of`."""
    contribution: bytes
    """Its contribution's id."""
    tokens: int
    """That the contribution says it stands for, in all shards."""
    grant: bytes = field(default=NO_GRANT, compare=False, repr=False)
    """Its public key and signature for the maker of the result. It does not say who the contributor is."""

    @classmethod
    def of(
        cls, peer: PeerId, identity: ContributionId, tokens: int, grant: bytes = NO_GRANT
    ) -> Contributor:
        return cls(tag_of(peer), identity[:NAME_BYTES], min(max(0, tokens), MOST_TOKENS), grant)

    def made(self, identity: ContributionId) -> bool:
        return self.contribution == identity[:NAME_BYTES]


@dataclass(frozen=True, slots=True)
class Table:
    """Who is in which shard of one result."""

    shards: Mapping[int, frozenset[Contributor]]
    """None of them empty."""

    @property
    def contributors(self) -> tuple[Contributor, ...]:
        return tuple(sorted({one for held in self.shards.values() for one in held}))

    def tokens(self, shards: int) -> int:
        """That the result stands for, of a run with so many shards: each contributor's, by the share of its
        slices that are in it."""
        return sum(one.tokens for held in self.shards.values() for one in held) // shards

    def shards_of(self) -> dict[Contributor, frozenset[int]]:
        """Return the shards in which each contributor is, in the table's order."""
        found: dict[Contributor, set[int]] = {one: set() for one in self.contributors}
        for shard, held in self.shards.items():
            for one in held:
                found[one].add(shard)
        return {one: frozenset(shards) for one, shards in found.items()}

    def holding(self, identity: ContributionId) -> frozenset[int]:
        """The shards that have a slice of this contribution."""
        return frozenset(
            shard for shard, held in self.shards.items() if any(one.made(identity) for one in held)
        )

    def written(self) -> bytes:
        contributors = self.contributors
        parts = [_COUNT.pack(len(contributors))]
        parts += [
            _CONTRIBUTOR.pack(one.peer, one.contribution, one.tokens, one.grant) for one in contributors
        ]
        parts.append(_COUNT.pack(len(self.shards)))
        for shard, held in sorted(self.shards.items()):
            bits = sum(1 << place for place, one in enumerate(contributors) if one in held)
            parts += [_COUNT.pack(shard), bits.to_bytes(_mask_bytes(len(contributors)), "little")]
        return b"".join(parts)


def longest_head(shards: int, contributors: int = MOST_CONTRIBUTORS) -> int:
    """Bytes."""
    each = _COUNT.size + _mask_bytes(contributors)
    return 2 * _COUNT.size + contributors * _CONTRIBUTOR.size + shards * each + DIGEST_BYTES


def head_of(table: Table, sums: bytes) -> bytes:
    """What a reducer signs: it stays true of sums that nobody keeps any more."""
    return table.written() + hashlib.sha256(sums).digest()[:DIGEST_BYTES]


def read_head(result: bytes, shards: int) -> tuple[Table, int]:
    """The table of a result and the length of its head in bytes. ContributionError."""
    table, length = read_table(result, shards)
    if len(result) < length + DIGEST_BYTES:
        raise ContributionError(f"{len(result)} bytes are too few for a result's head")
    return table, length + DIGEST_BYTES


def read_result(result: bytes, shards: int) -> tuple[Table, memoryview]:
    """The table of a result, and its sums. ContributionError: not those that were signed."""
    table, start = read_head(result, shards)
    sums = memoryview(result)[start:]
    if hashlib.sha256(sums).digest()[:DIGEST_BYTES] != result[start - DIGEST_BYTES : start]:
        raise ContributionError("the sums are not those that the head of the result names")
    return table, sums


def read_table(data: bytes | memoryview, shards: int) -> tuple[Table, int]:
    """The table at the head of a result in a run with so many shards, and its length in bytes.
    ContributionError."""
    try:
        (count,) = _COUNT.unpack_from(data)
        end = _COUNT.size + count * _CONTRIBUTOR.size
        contributors = [Contributor(*found) for found in _CONTRIBUTOR.iter_unpack(data[_COUNT.size : end])]
        (width,) = _COUNT.unpack_from(data, end)
    except struct.error:
        raise ContributionError(f"{len(data)} bytes are too few for a result's table") from None
    if count > MOST_CONTRIBUTORS or not 0 < width <= shards:
        raise ContributionError(f"a result of {count} contributors in {width} of {shards} shards")
    mask, start = _mask_bytes(count), end + _COUNT.size
    length = start + width * (_COUNT.size + mask)
    if len(data) < length:
        raise ContributionError(f"{len(data)} bytes are too few for a table of {length}")
    found: dict[int, frozenset[Contributor]] = {}
    for place in range(start, length, _COUNT.size + mask):
        (shard,) = _COUNT.unpack_from(data, place)
        bits = int.from_bytes(data[place + _COUNT.size : place + _COUNT.size + mask], "little")
        if bits >> count or not bits:
            raise ContributionError(f"shard {shard} names nobody, or more than the table's {count}")
        found[shard] = frozenset(one for index, one in enumerate(contributors) if bits >> index & 1)
    table = Table(found)
    if len(found) != width or max(found) >= shards or len({one.peer for one in contributors}) != count:
        raise ContributionError("a shard or a contributor is named twice, or a shard that there is not")
    if table.written() != data[:length]:
        raise ContributionError("the table is not in order, or names somebody who is in no shard")
    return table, length


def counting(tables: Mapping[PeerId, Table], draw: Draw, round: int) -> dict[int, tuple[PeerId, ...]]:
    """Return for each shard the makers of the results that count in it, the largest result first.

    A result with fewer than half as many contributors in a shard as the round's largest does not count there.
    Of results that share a contributor the one with more contributors counts; of equally large ones
    `Draw.rank` decides. It is a pure function of a round's set, so all peers compute the same."""
    sizes = [len(held) for table in tables.values() for held in table.shards.values()]
    largest = max(sizes, default=0)
    counted: dict[int, tuple[PeerId, ...]] = {}
    for shard in sorted({shard for table in tables.values() for shard in table.shards}):
        large = {
            maker: table.shards[shard] for maker, table in tables.items()
            if 2 * len(table.shards.get(shard, ())) >= largest
        }  # fmt: skip
        seen: set[bytes] = set()
        taken: list[PeerId] = []
        for maker in sorted(large, key=lambda one: (-len(large[one]), draw.rank(round, shard, one))):
            peers = {one.peer for one in large[maker]}
            if not seen & peers:
                seen |= peers
                taken.append(maker)
        counted[shard] = tuple(taken)
    return counted


@dataclass(frozen=True, slots=True)
class Draw:
    """Who reduces what: drawn anew for every block of rounds, for each shard by itself (rendezvous hashing,
    Thaler and Ravishankar 1998), so that somebody who comes or goes changes little, and those who see the
    same peers draw the same.

    A block's draw depends on the chain of settled sets shortly before the block begins. So a peer cannot try
    keys until one is drawn: when the draw is known, the block begins. Ties between results follow from the
    run's id and the round alone: peers that know only a settled set must break them alike."""

    seed: bytes
    """Of the run."""
    block_rounds: int
    shards: int
    window: int
    """Of the run's rounds."""

    def seed_round(self, round: int) -> int:
        """Return the round after which the chain's value is the seed of this round's block; negative: none,
        the seed is START (history.py)."""
        return self.first_round(round) - self.window - 1

    def first_round(self, round: int) -> int:
        """Return the first round of this round's block."""
        return round - round % self.block_rounds

    def rank(self, round: int, shard: int, maker: PeerId) -> bytes:
        """Return what decides between equally large results: the smallest counts."""
        return _place(self.seed, b"", round, shard, maker)

    def place(self, round: int, shard: int, peer: PeerId, value: bytes) -> bytes:
        """Return a peer's place in the draw of a round's block: the smallest is drawn. `value`: of the chain
        after `seed_round`."""
        return _place(self.seed, value, round // self.block_rounds, shard, peer)

    def reducers(self, round: int, peers: Iterable[PeerId], value: bytes) -> tuple[PeerId, ...]:
        """For each shard, of these. `value`: of the chain after `seed_round`."""
        known = tuple(peers)

        def draw(shard: int) -> PeerId:
            return min(known, key=lambda peer: self.place(round, shard, peer, value))

        return tuple(map(draw, range(self.shards)))


def draw_of(manifest: Manifest) -> Draw:
    rules = manifest.rounds
    return Draw(
        bytes.fromhex(manifest.run_id()), rules.snapshot_rounds, manifest.sync.shards, rules.window
    )


@lru_cache(1 << 16)
def _place(seed: bytes, value: bytes, number: int, shard: int, peer: PeerId) -> bytes:
    return hashlib.sha256(seed + value + f"\n{number}\n{shard}\n{peer}".encode()).digest()


def _mask_bytes(contributors: int) -> int:
    return -(-contributors // 8)
