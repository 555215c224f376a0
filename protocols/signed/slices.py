"""Slices of a contribution, sent to the reducers that sum them. Each slice can be verified separately.

A slice is the part of a contribution for one shard of the weights. The contributor signs an envelope around
the digests of all slices, 16 bytes each. It is sent with every slice:

    body       envelope around SHA-256 (first 16 B) of slice 0, 1, ... | the slices that this receiver reduces

On the way to a reducer, the contributor's 64-byte signature of its grant (grants.py) precedes the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocols.errors import Malformed
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity
from protocols.signed.token_count import encode_tokens, tokens_in
from swarmnet.identifiers import ContributionId, PeerId, RunId

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class VerifiedSlices:
    """Verified slices of one contribution."""

    sender: PeerId
    stage: int
    round: int
    tokens: int
    """Number of tokens that the contribution claims to represent."""
    id: ContributionId
    data: Mapping[int, bytes]
    """The slices by shard."""


def head_bytes(shards: int) -> int:
    """Return the size in bytes of the head before the slices."""
    return ENVELOPE_BYTES + DIGEST_BYTES * shards


def sign_slices(
    identity: Identity, run_id: RunId, stage: int, round: int, tokens: int, slices: Sequence[bytes]
) -> tuple[bytes, ContributionId]:
    """Sign the slices of a contribution, which represents `tokens` tokens. Returns the head that is sent with
    every slice, and the contribution's id."""
    digests = b"".join(map(_digest, slices))
    head = seal(identity, run_id, EnvelopeKind.SLICES, stage, round, encode_tokens(tokens, round), digests)
    return head, open_envelope(head, run_id, EnvelopeKind.SLICES, len(digests)).id


def open_slices(body: bytes, run_id: RunId, shards: Sequence[int], sizes: Sequence[int]) -> VerifiedSlices:
    """Verify and decode slices. `shards` lists the shards in the body, ascending. `sizes` gives the bytes of
    a slice for every shard of the run. Raises Malformed if the body does not match these or a slice is not
    the signed one. Raises TooLarge, WrongRun or BadSignature for its envelope."""
    count = len(sizes)
    if not shards or list(shards) != sorted(set(shards)) or not 0 <= shards[0] <= shards[-1] < count:
        raise Malformed(f"slices of the shards {list(shards)[:8]} of {count}")
    start = head_bytes(count)
    if len(body) != start + sum(sizes[shard] for shard in shards):
        raise Malformed(f"slices of {len(body)} bytes, which are not as long as the run's")
    envelope = open_envelope(body[:start], run_id, EnvelopeKind.SLICES, DIGEST_BYTES * count)
    data: dict[int, bytes] = {}
    for shard in shards:
        data[shard] = body[start : start + sizes[shard]]
        start += sizes[shard]
        signed_digest = envelope.payload[DIGEST_BYTES * shard :][:DIGEST_BYTES]
        if _digest(data[shard]) != signed_digest:
            raise Malformed(f"the slice of shard {shard} is not the one that was signed")
    tokens = tokens_in(envelope.sequence) or 0
    return VerifiedSlices(envelope.sender, envelope.stage, envelope.round, tokens, envelope.id, data)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]
