"""Messages of a group's rounds: contributions, which of them are accepted, what was settled, receipts of
that, and audits of reducers.

See table.py and docs/wire.md for the message numbers and other properties.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from protocols.fields import (
    BodyLimit,
    Count,
    Digest,
    Identifier,
    Level,
    Message,
    Name,
    Number,
    RoundNumber,
    RunSizes,
    SetDigest,
)
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.identity import SIGNATURE_BYTES
from protocols.signed.signed_receipts import SEALED_BYTES
from protocols.signed.slices import head_bytes

MAX_STATEMENTS = 256
"""Maximum number of statements in one message; each takes 164 bytes, or 172 after a return."""


class ContributionRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Identifies one contribution."""

    round: RoundNumber
    peer: Name
    id: Identifier
    size: Number


class OpenRound(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender's view of one open round."""

    round: RoundNumber
    gathered: Level
    """Agreement level on what was gathered (docs/consistency.md). Level 1: the sender's contribution exists
    (or it makes none), and it fetches nothing. Level k + 1: all its neighbours are at level k or more."""
    sealed: Level
    """Agreement level on the set. 0: the sender may still contribute. Level 1: it contributes no more and
    only accepts what other peers' sets contain. Level k + 1: all its neighbours are at level k or more with
    the same set."""
    count: Count
    digest: SetDigest
    """First 12 bytes of the SHA-256 over the sorted ids."""


class Progress(Message, frozen=True, tag=20):
    """The sender's position in the group's rounds."""

    kind: ClassVar[str] = "update"
    round: RoundNumber
    """The round to which the sender currently adds gradients."""
    tokens: Number
    """Number of tokens that the sender has committed for that round."""
    contributed: list[RoundNumber]
    """Recent rounds to which the sender contributed. A recent round before `round` that is missing here gets
    no contribution from the sender."""
    settled: RoundNumber
    in_step: bool
    """False while the sender catches up; other peers then do not wait for it."""
    anchor_round: RoundNumber
    anchor: Digest
    """Hash of the sender's chain of settled sets after `anchor_round` (docs/consistency.md)."""
    sets: list[OpenRound]
    """All rounds after `anchor_round` that the sender has closed, settled or not."""


class Announce(Message, frozen=True, tag=21):
    """Contributions that the sender holds."""

    kind: ClassVar[str] = "update"
    references: list[ContributionRef]
    complete: list[RoundNumber]
    """Rounds that are settled at the sender; `references` names their complete sets."""


class GetContributions(Message, frozen=True, tag=22):
    """Request contributions by their ids."""

    kind: ClassVar[str] = "update"
    ids: list[Identifier]


def contribution_bytes(run: RunSizes) -> int:
    """Return the size in bytes of a signed contribution, a peer's compressed update of a round."""
    return ENVELOPE_BYTES + run.payload_bytes


def slices_bytes(run: RunSizes) -> int:
    """Return the size in bytes of all slices of a contribution, with their signed head. With reducers, peers
    that sum one shard of the weights each, a contribution is cut into one slice for each shard."""
    return head_bytes(run.manifest.sync.shards) + run.slices_bytes


class Contribution(Message, frozen=True, tag=23):
    """A contribution. Body: the signed envelope with the payload."""

    kind: ClassVar[str] = "contribution"
    priority: ClassVar[int] = 1
    body: ClassVar[BodyLimit] = contribution_bytes


class Slices(Message, frozen=True, tag=28):
    """Slices of the sender's contribution to a round, for the reducer of these shards. Body: see
    protocols/signed/slices.py. Without shards and body, the sender contributes nothing to that round, or
    nothing in the receiver's shards."""

    kind: ClassVar[str] = "contribution"
    priority: ClassVar[int] = 1
    body: ClassVar[BodyLimit] = lambda run: SIGNATURE_BYTES + slices_bytes(run) if run.slices_bytes else 0
    round: RoundNumber
    shards: list[Number]


class GetIds(Message, frozen=True, tag=24):
    """Request the ids of these rounds. The answer is an `Announce` with all contributions held."""

    kind: ClassVar[str] = "update"
    rounds: list[RoundNumber]


class GetChain(Message, frozen=True, tag=25):
    """Request the settled sets up to round `last`, as branches differ. The answer is `ChainResponse`."""

    kind: ClassVar[str] = "update"
    last: RoundNumber


class ChainResponse(Message, frozen=True, tag=26):
    """Settled sets of the rounds first, first + 1, ...: for each a count and a 12-byte digest."""

    kind: ClassVar[str] = "update"
    first: RoundNumber
    before: Digest
    """Hash of the chain before round `first`."""
    counts: list[Count]
    digests: bytes


class Statements(Message, frozen=True, tag=27):
    """Signed statements about settled weights, made by the sender or by other peers. Each is an envelope
    around the chain value after a round (12 or 20 bytes) and the digest of the settled weights (32)."""

    kind: ClassVar[str] = "update"
    statements: list[Annotated[bytes, Meta(max_length=172)]]


class ReceiptMessage(Message, frozen=True, tag=70):
    """Signed statement about the receiver's contributions that the sender saw settle. It needs no reply."""

    kind: ClassVar[str] = "update"
    receipt: Annotated[bytes, Meta(max_length=SEALED_BYTES)]
    """An envelope around a `ReceiptBody` (protocols/signed/signed_receipts.py). The envelope's round is
    the last round."""


def longest_evidence(run: RunSizes) -> int:
    """Return the largest body of evidence in bytes: a result, or slices; 0 without reducers."""
    return max(contribution_bytes(run), slices_bytes(run)) if run.slices_bytes else 0


class GetSlices(Message, frozen=True, tag=80):
    """Request the slices of one shard that went into a result. The reducer that made the result, or a peer
    that sent `FraudProof` about it, replies with one `Evidence` per slice."""

    kind: ClassVar[str] = "audit"
    result: Identifier
    shard: Number


class Evidence(Message, frozen=True, tag=81):
    """Body: one slice with its signed head (protocols/signed/slices.py). A peer that sent `FraudProof` about
    the result sends the signed result first."""

    kind: ClassVar[str] = "audit"
    priority: ClassVar[int] = 1
    body: ClassVar[BodyLimit] = longest_evidence
    result: Identifier
    shard: Number


class FraudProof(Message, frozen=True, tag=82):
    """The sender has proof that `peer` published a false result for `round`: its `shard` does not match the
    slices. It is repeated once a second until the receiver also sends `FraudProof` for this result."""

    kind: ClassVar[str] = "audit"
    peer: Name
    round: RoundNumber
    result: Identifier
    shard: Number
