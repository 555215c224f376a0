"""Messages of a group's rounds: contributions, which of them count, and what was settled.

Their numbers and the rest of the table are in table.py and docs/wire.md.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from protocols.fields import (
    Count,
    Digest,
    Identifier,
    Level,
    Message,
    Name,
    Number,
    RoundNumber,
    SetDigest,
)

MOST_STATEMENTS = 256
"""In one message: 164 bytes each."""


class Reference(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names one contribution."""

    round: RoundNumber
    peer: Name
    id: Identifier
    size: Number


class OpenRound(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the sender holds of one open round."""

    round: RoundNumber
    gathered: Level
    """1: the sender's own contribution is made (or it makes none) and it pulls nothing; k + 1: all its
    neighbours are at k or more (docs/consistency.md)."""
    sealed: Level
    """1: the sender makes nothing more for it, and only takes what other peers' sets hold; k + 1: all its
    neighbours are at k or more with the same set. 0: it may still make something."""
    count: Count
    digest: SetDigest
    """First 12 bytes of SHA-256 over the sorted ids."""


class Progress(Message, frozen=True, tag=20):
    """Where the sender is in the group's rounds."""

    kind: ClassVar[str] = "update"
    round: RoundNumber
    """The round it adds gradients to."""
    tokens: Number
    """What it has committed for that round."""
    contributed: list[RoundNumber]
    """Of the recent rounds, those to which it made a contribution; a recent round before `round` that is
    not here gets none from it."""
    settled: RoundNumber
    in_step: bool
    """False while it catches up: nobody waits for it."""
    anchor_round: RoundNumber
    anchor: Digest
    """The value of the sender's chain of settled sets after `anchor_round` (docs/consistency.md)."""
    sets: list[OpenRound]
    """Every round after `anchor_round` that the sender has closed, settled or not."""


class Announce(Message, frozen=True, tag=21):
    """Contributions the sender holds."""

    kind: ClassVar[str] = "update"
    references: list[Reference]
    complete: list[RoundNumber]
    """Rounds that are settled at the sender: `references` names their whole sets."""


class Want(Message, frozen=True, tag=22):
    kind: ClassVar[str] = "update"
    ids: list[Identifier]


class Contribution(Message, frozen=True, tag=23):
    """Body: the signed envelope with the payload."""

    kind: ClassVar[str] = "contribution"
    priority: ClassVar[int] = 1
    body: ClassVar[bool] = True


class Slices(Message, frozen=True, tag=28):
    """Of the sender's contribution to a round, for whoever adds these shards up. Body:
    protocols/signed/slices.py; no shards and no body: it contributes nothing to that round, or to none of
    them."""

    kind: ClassVar[str] = "contribution"
    priority: ClassVar[int] = 1
    body: ClassVar[bool] = True
    round: RoundNumber
    shards: list[Number]


class AskIds(Message, frozen=True, tag=24):
    """Answered by Announce with everything held of these rounds."""

    kind: ClassVar[str] = "update"
    rounds: list[RoundNumber]


class AskChain(Message, frozen=True, tag=25):
    """The histories differ: the settled sets up to round `last`; answered by ChainIs."""

    kind: ClassVar[str] = "update"
    last: RoundNumber


class ChainIs(Message, frozen=True, tag=26):
    """Settled sets of the rounds first, first + 1, ...: number of contributions, 12 bytes of digest each."""

    kind: ClassVar[str] = "update"
    first: RoundNumber
    before: Digest
    """The chain's value before `first`."""
    counts: list[Count]
    digests: bytes


class Statements(Message, frozen=True, tag=27):
    """Signed words on settled weights, of the sender or of others: envelopes around the value of the chain of
    settled sets after a round (12 bytes) and the digest of the settled weights there (32)."""

    kind: ClassVar[str] = "update"
    statements: list[Annotated[bytes, Meta(max_length=164)]]
