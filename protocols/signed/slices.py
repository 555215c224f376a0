"""Slices of a contribution, for whoever adds them up: each can be proven by itself.

What the contributor signs is an envelope around the digests of all slices, 16 bytes each; it goes with every
slice:

    body       envelope around SHA-256 (first 16 B) of slice 0, 1, ... | the slices that this receiver reduces

On their way to a reducer the contributor's signature of its grant (grants.py), 64 bytes, comes before that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocols.errors import Malformed
from protocols.signed.envelope import ENVELOPE_BYTES, Kind, open_envelope, seal
from protocols.signed.identity import Identity
from protocols.signed.told_tokens import tokens_in, told
from swarmnet.identifiers import ContributionId, PeerId, RunId

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Slices:
    """Verified: these are slices of this contribution."""

    sender: PeerId
    stage: int
    round: int
    tokens: int
    """That the contribution says it stands for."""
    id: ContributionId
    data: Mapping[int, bytes]
    """By shard."""


def head_bytes(shards: int) -> int:
    """What stands before the slices."""
    return ENVELOPE_BYTES + DIGEST_BYTES * shards


def sign_slices(
    identity: Identity, run_id: RunId, stage: int, round: int, tokens: int, slices: Sequence[bytes]
) -> tuple[bytes, ContributionId]:
    """The head of a contribution's slices, and its name."""
    digests = b"".join(map(_digest, slices))
    head = seal(identity, run_id, Kind.SLICES, stage, round, told(tokens, round), digests)
    return head, open_envelope(head, run_id, Kind.SLICES, len(digests)).id


def open_slices(body: bytes, run_id: RunId, shards: Sequence[int], sizes: Sequence[int]) -> Slices:
    """`shards`: whose slices the body has; `sizes`: bytes of every slice of the run. Raises as
    `open_envelope`, and Malformed where a slice is not the one that was signed."""
    count = len(sizes)
    if not shards or list(shards) != sorted(set(shards)) or not 0 <= shards[0] <= shards[-1] < count:
        raise Malformed(f"slices of the shards {list(shards)[:8]} of {count}")
    start = head_bytes(count)
    if len(body) != start + sum(sizes[shard] for shard in shards):
        raise Malformed(f"slices of {len(body)} bytes, which are not as long as the run's")
    envelope = open_envelope(body[:start], run_id, Kind.SLICES, DIGEST_BYTES * count)
    data: dict[int, bytes] = {}
    for shard in shards:
        data[shard] = body[start : start + sizes[shard]]
        start += sizes[shard]
        if _digest(data[shard]) != envelope.payload[DIGEST_BYTES * shard :][:DIGEST_BYTES]:
            raise Malformed(f"the slice of shard {shard} is not the one that was signed")
    tokens = tokens_in(envelope.sequence) or 0
    return Slices(envelope.sender, envelope.stage, envelope.round, tokens, envelope.id, data)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]
