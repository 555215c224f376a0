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
from protocols.inference_messages import AskForward as AskForward
from protocols.inference_messages import Declined as Declined
from protocols.inference_messages import Forwarded as Forwarded
from protocols.message_fields import (
    Count,
    Digest,
    Identifier,
    Invite,
    Level,
    Name,
    Nats,
    Number,
    NumberOrNone,
    Reason,
    RoundNumber,
    Seconds,
    SetDigest,
    Shape,
    StageNumber,
)
from protocols.message_fields import Message as Message
from protocols.message_fields import Path as Path
from protocols.order_messages import OrderIs as OrderIs
from protocols.peer_record import PeerRecord as PeerRecord
from protocols.receipt_messages import ReceiptIs as ReceiptIs
from protocols.scouting_messages import Ask as Ask
from protocols.scouting_messages import Held as Held
from protocols.scouting_messages import Place as Place
from protocols.scouting_messages import Prospect as Prospect

Lane = Literal["data", "group", "bulk"]
"""What a link is for: microbatches; rounds and membership; snapshots and other long bodies."""

HEADER_LIMIT = 64 * 1024
"""Largest message header in bytes: 4 MB of MessagePack can become 296 MB of objects, 64 KiB cannot hurt."""

BODY_LIMIT = 64 * 1024 * 1024
"""The longest body where the receiver knows no better bound."""

MOST_STATEMENTS = 256
"""In one message: 164 bytes each."""


class Hello(Message, frozen=True, tag=1):
    """First on every link."""

    wire_version: Number
    run_id: Digest
    record: bytes
    """The sender's signed PeerRecord, or empty for a peer without a stage (bootstrap, observer)."""
    invite: Invite = b""
    """The owner's word that the sender may take part (protocols/invites.py); needed where the run's access is
    by invite."""


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
    wanted: bool
    """The receiver is among those that the sender keeps links to (swarmnet/neighbours.py); a link that
    neither side wants ends after a while."""
    moving_to: StageNumber = -1
    """The stage that the sender would move to (swarmnet/moving.py); -1: it stays."""


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
    path: Path = Path()


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
    queue_seconds: Seconds
    """How long it waited for that on these stages."""
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


NO_ATTEMPT = 0
"""Attempts are counted from 1."""


class Cancel(Message, frozen=True, tag=14):
    """The sender no longer wants it."""

    origin: Name
    counter: Number
    attempt: Number
    """The newest that is not wanted; NO_ATTEMPT: the place that was booked for it (scouting_messages)."""


class Credit(Message, frozen=True, tag=15):
    """What the sender can do for the receiver; follows every Grad and Busy (swarmnet/router.py)."""

    slots: Number
    """Microbatches that it takes from the receiver, in all, at a time."""
    service_seconds: Seconds
    """Own compute per microbatch, forward and backward together; 0: not measured yet."""
    waiting: Number
    """Pieces of work that wait for its compute."""


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


AnyMessage = (
    Hello | Refuse | Known | Beat | Bye | Act | Grad | Busy | Nack | Cancel | Credit
    | Prospect | Ask | Place | Held | Progress | Announce | Want | Contribution | AskIds | AskChain
    | ChainIs | Statements | AskState | State | AskChunk | Chunk | NoChunk | AskManifest | ManifestIs
    | AskForward | Forwarded | Declined | OrderIs | ReceiptIs
)  # fmt: skip

DATA_MESSAGES = (Act, Grad, Busy, Nack, Cancel, Credit, Prospect, Ask, Place, Held)
"""Of the data path."""
STATE_MESSAGES = (AskState, State, AskChunk, Chunk, NoChunk)
"""Of the state path."""

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
