"""Every message as a typed struct. Control is MessagePack arrays, tensors and files travel as the body.

Messages are one-way: a reply is a message of its own, sent over the other side's link, and matched by
what it names (a microbatch, a contribution id, a chunk). Anything may be lost; deadlines are the
sender's. docs/wire.md holds the table. Durations in seconds, sizes in bytes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from protocols.errors import Malformed

Lane = Literal["data", "group", "bulk"]
"""What a link is for: microbatches; rounds and membership; snapshots and other long bodies."""

HEADER_LIMIT = 64 * 1024
"""Largest message header in bytes: 4 MB of MessagePack can become 296 MB of objects, 64 KiB cannot hurt."""

# What no honest peer exceeds; the decoder refuses the rest, so handlers meet no surprise. NaN is refused by
# every bound on a float.
Name = Annotated[str, Meta(max_length=64)]
"""A peer id, or a code."""
Reason = Annotated[str, Meta(max_length=1000)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
NumberOrNone = Annotated[int, Meta(ge=-1, lt=2**62)]
RoundNumber = Annotated[int, Meta(ge=-1, lt=2**32)]
"""-1: before the first. Envelopes have 32 bits for it."""
Count = Annotated[int, Meta(ge=0, lt=2**15)]
"""Contributions of a round: a tally holds as many votes (votes.VoteTally)."""
StageNumber = Annotated[int, Meta(ge=-1, lt=2**15)]
Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
Nats = Annotated[float, Meta(ge=0.0, le=1e15)]
Shape = tuple[Number, Number, Number]
Identifier = Annotated[bytes, Meta(max_length=16)]
"""ContributionId."""
Digest = Annotated[bytes, Meta(max_length=32)]
SetDigest = Annotated[bytes, Meta(max_length=8)]


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """`kind` groups bytes in the metrics; `priority`: smaller overtakes larger on one link."""

    kind: ClassVar[str] = "control"
    priority: ClassVar[int] = 0
    body: ClassVar[bool] = False
    """Whether a body may follow. A body on any other message is malformed."""


class Hello(Message, frozen=True, tag=1):
    """First on every link."""

    wire_version: Number
    run_id: Digest
    record: bytes
    """The sender's signed PeerRecord, or empty for a peer without a stage (bootstrap, observer)."""


class Refuse(Message, frozen=True, tag=2):
    """Why the link is being closed. `code` is a WireError code."""

    code: Name
    reason: Reason


class Known(Message, frozen=True, tag=3):
    """Signed PeerRecords of others, so that a newcomer need not wait for the directory."""

    records: list[bytes]


class Beat(Message, frozen=True, tag=4):
    """Alive, and how loaded. Sent at least every `BEAT_SECONDS` on the group lane."""

    sequence: Number
    echo: NumberOrNone
    """The last sequence seen from the receiver, for round-trip times; -1: none."""
    echo_delay: Seconds
    """Seconds that passed here since that one came."""
    stage: StageNumber
    ready: bool
    """Takes microbatches."""
    slots: Number
    """Microbatches it would take now from anyone."""
    service_seconds: Seconds
    """Own compute per microbatch, forward and backward together."""
    round: RoundNumber


class Bye(Message, frozen=True, tag=5):
    reason: Reason


class Act(Message, frozen=True, tag=10):
    """A microbatch one stage down. Body: hidden states, then labels as int32 [B, T]."""

    kind: ClassVar[str] = "activation"
    priority: ClassVar[int] = 2
    body: ClassVar[bool] = True
    origin: Name
    counter: Number
    attempt: Number
    """Counts the sender's tries of this microbatch, so that answers to an old one are told apart."""
    stage: StageNumber
    """The stage that is to do it."""
    deadline_seconds: Seconds
    """How long the sender waits for GRAD from now on; each hop passes on less."""
    shape: Shape


class Grad(Message, frozen=True, tag=11):
    """The gradient of the hidden states back up. Body: as the hidden states."""

    kind: ClassVar[str] = "gradient"
    priority: ClassVar[int] = 1
    body: ClassVar[bool] = True
    origin: Name
    counter: Number
    attempt: Number
    loss_sum: Nats
    """Nats, summed over `tokens`."""
    tokens: Number
    path_seconds: Seconds
    """What the stages from here down spent computing."""
    shape: Shape


class Busy(Message, frozen=True, tag=12):
    """No slot free: send it elsewhere."""

    kind: ClassVar[str] = "control"
    origin: Name
    counter: Number
    attempt: Number


class Nack(Message, frozen=True, tag=13):
    """It will not be done here (wrong stage, malformed, not finite, path below lost)."""

    origin: Name
    counter: Number
    attempt: Number
    code: Name
    reason: Reason


class Cancel(Message, frozen=True, tag=14):
    """The sender no longer wants it."""

    origin: Name
    counter: Number
    attempt: Number


class Credit(Message, frozen=True, tag=15):
    """How many microbatches the sender of this takes from the receiver, in all, at a time."""

    slots: Number


class Reference(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names one contribution."""

    round: RoundNumber
    peer: Name
    id: Identifier
    size: Number


class OpenRound(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the sender holds of one open round."""

    round: RoundNumber
    sealed: bool
    """The sender makes nothing more for it; it still takes what other peers' sets hold."""
    count: Count
    digest: SetDigest
    """First 8 bytes of SHA-256 over the sorted ids."""


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


class AskIds(Message, frozen=True, tag=24):
    """Answered by Announce with everything held of these rounds."""

    kind: ClassVar[str] = "update"
    rounds: list[RoundNumber]


class AskChain(Message, frozen=True, tag=25):
    """The histories differ: the settled sets up to round `last`; answered by ChainIs."""

    kind: ClassVar[str] = "update"
    last: RoundNumber


class ChainIs(Message, frozen=True, tag=26):
    """Settled sets of the rounds first, first + 1, ...: number of contributions, 8 bytes of digest each."""

    kind: ClassVar[str] = "update"
    first: RoundNumber
    before: Digest
    """The chain's value before `first`."""
    counts: list[Count]
    digests: bytes


class AskState(Message, frozen=True, tag=30):
    """Answered by State."""

    kind: ClassVar[str] = "snapshot"


class State(Message, frozen=True, tag=31):
    """What a newcomer can get here."""

    kind: ClassVar[str] = "snapshot"
    stage: StageNumber
    round: RoundNumber
    settled: RoundNumber
    digest: Digest
    """Of the settled weights at `settled`."""
    roots: list[bytes]
    """Signed snapshot roots (an envelope around a SnapshotRoot), newest first."""
    oldest_set: RoundNumber
    """First settled round whose set and contributions are still kept here: from the round before it a
    newcomer can go on by contributions alone."""


class SnapshotRoot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="root"):
    """Signed payload: the settled weights of a stage at a round, in chunks."""

    round: RoundNumber
    stage: StageNumber
    size: Number
    digest: Digest
    """Replica.digest() at that round."""
    chain: Digest
    """The value of the chain of settled sets there."""
    chunks: list[Digest]
    """SHA-256 of each chunk."""


class AskChunk(Message, frozen=True, tag=32):
    kind: ClassVar[str] = "snapshot"
    digest: Digest
    index: Number


class Chunk(Message, frozen=True, tag=33):
    kind: ClassVar[str] = "snapshot"
    priority: ClassVar[int] = 3
    body: ClassVar[bool] = True
    digest: Digest
    index: Number


class NoChunk(Message, frozen=True, tag=34):
    kind: ClassVar[str] = "snapshot"
    digest: Digest
    index: Number


class AskManifest(Message, frozen=True, tag=40):
    """Allowed before HELLO is answered: it is how a newcomer learns what the run is."""


class ManifestIs(Message, frozen=True, tag=41):
    """Body: the canonical manifest, then the owner's 64-byte signature."""

    body: ClassVar[bool] = True


class PeerRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="peer"):
    """What a peer says of itself in the directory, signed; a hint until its handlers answer."""

    peer: Name
    stage: StageNumber
    """-1: holds none."""
    role: str
    addresses: list[str]
    """Multiaddrs without the /p2p/ part."""
    round: RoundNumber
    tokens_per_second: float
    version: str


AnyMessage = (
    Hello | Refuse | Known | Beat | Bye | Act | Grad | Busy | Nack | Cancel | Credit | Progress | Announce
    | Want | Contribution | AskIds | AskChain | ChainIs | AskState | State | AskChunk | Chunk | NoChunk
    | AskManifest | ManifestIs
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """MessagePack bytes of a message header."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message in `data`; Malformed if it is none. `data` must have passed the guard (guard.py)."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a message of this wire version: {error}") from None
