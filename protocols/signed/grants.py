"""Grants: signatures by which a contributor allows one reducer to sum its slices.

With sharded reduction, a peer cuts its contribution into slices, one per shard of the weights. A reducer sums
the slices of a shard and publishes the *result*. A result's table carries the grant of each contributor. Thus
a reducer can name only peers that sent it slices, with their contributions and in exactly the shards that
they sent. A grant is not valid for another reducer, round, stage or run:

    wire       public key 32 B | signature 64 B
    statement  domain | run id 32 B | contributor's key 32 B | reducer's key 32 B | stage i16 | round u32
               | contribution 16 B | tokens u32 | one bit for each shard, the first one lowest
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from protocols.errors import BadSignature, Malformed
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    is_signed,
    peer_id_of,
    public_key_bytes,
)
from protocols.signed.slices import VerifiedSlices
from swarmnet.identifiers import PeerId, RunId
from swarmnet.rounds.result_table import MAX_TOKENS, NAME_BYTES, Table, tag_of

_DOMAIN = b"swarmnet grant 1\0"
_STATEMENT = struct.Struct(f">{len(_DOMAIN)}s32s{PUBLIC_KEY_BYTES}s{PUBLIC_KEY_BYTES}shI{NAME_BYTES}sI")


@dataclass(frozen=True, slots=True)
class Reduction:
    """The scope of a grant: one reducer's result for one round."""

    run_id: RunId
    stage: int
    round: int
    reducer: PeerId

    def statement(self, contributor: bytes, contribution: bytes, tokens: int, shards: Iterable[int]) -> bytes:
        """Return the bytes that a contributor signs. `contributor` is its public key, and `contribution` the
        id of its contribution from `tokens` tokens. `shards` are those of which it sends slices."""
        bits = sum(1 << shard for shard in shards)  # One bit for each shard.
        head = _STATEMENT.pack(
            _DOMAIN,
            run_bytes(self.run_id),
            contributor,
            public_key_bytes(self.reducer),
            self.stage,
            self.round,
            contribution,
            min(max(0, tokens), MAX_TOKENS),
        )
        return head + bits.to_bytes(-(-bits.bit_length() // 8), "little")


def sign_grant(
    identity: Identity, reduction: Reduction, contribution: bytes, tokens: int, shards: Iterable[int]
) -> bytes:
    """Return the 64-byte signature of the grant."""
    return identity.sign(reduction.statement(identity.public_key, contribution, tokens, shards))


def require_grant(signature: bytes, reduction: Reduction, slices: VerifiedSlices) -> None:
    """Raise BadSignature unless the sender of these slices allows this reducer to sum all of them."""
    key = public_key_bytes(slices.sender)
    statement = reduction.statement(key, slices.id, slices.tokens, shards=slices.data)
    if not is_signed(slices.sender, statement, signature):
        raise BadSignature(f"slices of {slices.sender} without a grant for {reduction.reducer}")


def grant_of(contributor: PeerId, signature: bytes) -> bytes:
    """Return a grant in the form in which a table carries it."""
    return public_key_bytes(contributor) + signature


def contributors_of(table: Table) -> tuple[PeerId, ...]:
    """Return the peers whose slices a result's table lists, in order, from the public keys in their grants.
    Raises Malformed if a key does not match the peer's tag beside it in the table."""
    peers = []
    for contributor in table.contributors:
        peer = peer_id_of(contributor.grant[:PUBLIC_KEY_BYTES])
        if tag_of(peer) != contributor.peer:
            raise Malformed(f"a grant of {peer}, where the table names {contributor.peer.hex()}")
        peers.append(peer)
    return tuple(peers)


def require_grants(table: Table, reduction: Reduction) -> None:
    """Raise BadSignature unless each contributor allowed this reducer to sum its slices. Raises Malformed if
    a grant belongs to another peer than the table names. Takes about 0.1 ms for each contributor."""
    shards = table.shards_of()
    for peer, entry in zip(contributors_of(table), table.contributors, strict=True):
        key, signature = entry.grant[:PUBLIC_KEY_BYTES], entry.grant[-SIGNATURE_BYTES:]
        statement = reduction.statement(key, entry.contribution, entry.tokens, shards[entry])
        if not is_signed(peer, statement, signature):
            raise BadSignature(
                f"the result of {reduction.reducer} for round {reduction.round} names slices of {peer} in "
                f"the shards {sorted(shards[entry])}, which it has not granted"
            )
