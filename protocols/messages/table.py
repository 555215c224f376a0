"""Decode all messages as typed structs. Headers are MessagePack arrays; tensors and files travel as the body.

Messages are one-way. A reply is a separate message on the other side's link. It is matched by what it names:
a microbatch, a contribution id, or a chunk. Any message may be lost, and the sender enforces the deadlines.
docs/wire.md has the table. Durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from protocols.errors import Malformed
from protocols.fields import Message as Message
from protocols.fields import Path as Path
from protocols.messages.audits import Evidence as Evidence
from protocols.messages.audits import FraudProof as FraudProof
from protocols.messages.audits import GetSlices as GetSlices
from protocols.messages.inference import ForwardDeclined as ForwardDeclined
from protocols.messages.inference import Forwarded as Forwarded
from protocols.messages.inference import ForwardRequest as ForwardRequest
from protocols.messages.membership import Bye as Bye
from protocols.messages.membership import GetManifest as GetManifest
from protocols.messages.membership import Heartbeat as Heartbeat
from protocols.messages.membership import Hello as Hello
from protocols.messages.membership import ManifestResponse as ManifestResponse
from protocols.messages.membership import PeerRecords as PeerRecords
from protocols.messages.membership import Refuse as Refuse
from protocols.messages.microbatches import NO_ATTEMPT as NO_ATTEMPT
from protocols.messages.microbatches import Act as Act
from protocols.messages.microbatches import Busy as Busy
from protocols.messages.microbatches import Cancel as Cancel
from protocols.messages.microbatches import Credit as Credit
from protocols.messages.microbatches import Grad as Grad
from protocols.messages.microbatches import Nack as Nack
from protocols.messages.orders import OrderUpdate as OrderUpdate
from protocols.messages.receipts import ReceiptMessage as ReceiptMessage
from protocols.messages.reservations import HoldTime as HoldTime
from protocols.messages.reservations import Prospect as Prospect
from protocols.messages.reservations import ReservationReply as ReservationReply
from protocols.messages.reservations import ReservationRequest as ReservationRequest
from protocols.messages.rounds import MAX_STATEMENTS as MAX_STATEMENTS
from protocols.messages.rounds import Announce as Announce
from protocols.messages.rounds import ChainResponse as ChainResponse
from protocols.messages.rounds import Contribution as Contribution
from protocols.messages.rounds import ContributionRef as ContributionRef
from protocols.messages.rounds import GetChain as GetChain
from protocols.messages.rounds import GetContributions as GetContributions
from protocols.messages.rounds import GetIds as GetIds
from protocols.messages.rounds import OpenRound as OpenRound
from protocols.messages.rounds import Progress as Progress
from protocols.messages.rounds import Slices as Slices
from protocols.messages.rounds import Statements as Statements
from protocols.messages.snapshots import Chunk as Chunk
from protocols.messages.snapshots import GetChunk as GetChunk
from protocols.messages.snapshots import GetState as GetState
from protocols.messages.snapshots import NoChunk as NoChunk
from protocols.messages.snapshots import SnapshotOffer as SnapshotOffer
from protocols.messages.snapshots import SnapshotRoot as SnapshotRoot
from protocols.signed import msgpack_guard
from protocols.signed.peer_record import PeerRecord as PeerRecord

Lane = Literal["data", "group", "bulk"]
"""Purpose of a link: "data" for microbatches, "group" for rounds and membership, "bulk" for long bodies."""

HEADER_LIMIT = 64 * 1024
"""Largest message header in bytes. 4 MB of MessagePack can expand to 296 MB of objects; 64 KiB are harmless.
"""

BODY_LIMIT = 64 * 1024 * 1024
"""Largest body in bytes if the receiver knows no tighter bound."""

AnyMessage = (
    Hello
    | Refuse
    | PeerRecords
    | Heartbeat
    | Bye
    | Act
    | Grad
    | Busy
    | Nack
    | Cancel
    | Credit
    | Prospect
    | ReservationRequest
    | ReservationReply
    | HoldTime
    | Progress
    | Announce
    | GetContributions
    | Contribution
    | GetIds
    | GetChain
    | ChainResponse
    | Statements
    | Slices
    | GetState
    | SnapshotOffer
    | GetChunk
    | Chunk
    | NoChunk
    | GetManifest
    | ManifestResponse
    | ForwardRequest
    | Forwarded
    | ForwardDeclined
    | OrderUpdate
    | ReceiptMessage
    | GetSlices
    | Evidence
    | FraudProof
)

DATA_MESSAGES = (
    Act,
    Grad,
    Busy,
    Nack,
    Cancel,
    Credit,
    Prospect,
    ReservationRequest,
    ReservationReply,
    HoldTime,
)
"""Messages of the data path."""
AUDIT_MESSAGES = (GetSlices, Evidence, FraudProof)
"""Messages about results, in runs with reducers."""
STATE_MESSAGES = (GetState, SnapshotOffer, GetChunk, Chunk, NoChunk)
"""Messages of the state path."""

encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
"""Encode a message header as MessagePack bytes."""
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def decode(data: bytes) -> Message:
    """Return the message of a header that may come from an untrusted peer; its body is not included. Raises
    TooLarge above `HEADER_LIMIT` or a limit of msgpack_guard.py, and Malformed for an invalid one."""
    msgpack_guard.check(data, HEADER_LIMIT)
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a message of this wire version: {error}") from None
