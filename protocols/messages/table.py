"""Decode all messages as typed structs. Headers are MessagePack arrays; tensors and files travel as the body.

Messages are one-way. A reply is a separate message on the other side's link. It is matched by what it names:
a microbatch, a contribution id, or a chunk. Any message may be lost, and the sender enforces the deadlines.
docs/wire.md has the table. Durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Literal

import msgspec

from protocols.errors import Malformed
from protocols.fields import Message as Message
from protocols.fields import Path as Path
from protocols.messages.inference_messages import ForwardDeclined as ForwardDeclined
from protocols.messages.inference_messages import Forwarded as Forwarded
from protocols.messages.inference_messages import ForwardRequest as ForwardRequest
from protocols.messages.membership_messages import Bye as Bye
from protocols.messages.membership_messages import GetManifest as GetManifest
from protocols.messages.membership_messages import Heartbeat as Heartbeat
from protocols.messages.membership_messages import Hello as Hello
from protocols.messages.membership_messages import ManifestResponse as ManifestResponse
from protocols.messages.membership_messages import OrderUpdate as OrderUpdate
from protocols.messages.membership_messages import PeerRecords as PeerRecords
from protocols.messages.membership_messages import Refuse as Refuse
from protocols.messages.microbatch_messages import NO_ATTEMPT as NO_ATTEMPT
from protocols.messages.microbatch_messages import Act as Act
from protocols.messages.microbatch_messages import Busy as Busy
from protocols.messages.microbatch_messages import Cancel as Cancel
from protocols.messages.microbatch_messages import Check as Check
from protocols.messages.microbatch_messages import CheckAnswer as CheckAnswer
from protocols.messages.microbatch_messages import Credit as Credit
from protocols.messages.microbatch_messages import Grad as Grad
from protocols.messages.microbatch_messages import Nack as Nack
from protocols.messages.reservation_messages import HoldTime as HoldTime
from protocols.messages.reservation_messages import Prospect as Prospect
from protocols.messages.reservation_messages import ReservationReply as ReservationReply
from protocols.messages.reservation_messages import ReservationRequest as ReservationRequest
from protocols.messages.round_messages import MAX_STATEMENTS as MAX_STATEMENTS
from protocols.messages.round_messages import Announce as Announce
from protocols.messages.round_messages import ChainResponse as ChainResponse
from protocols.messages.round_messages import Contribution as Contribution
from protocols.messages.round_messages import ContributionRef as ContributionRef
from protocols.messages.round_messages import Evidence as Evidence
from protocols.messages.round_messages import FraudProof as FraudProof
from protocols.messages.round_messages import GetChain as GetChain
from protocols.messages.round_messages import GetContributions as GetContributions
from protocols.messages.round_messages import GetIds as GetIds
from protocols.messages.round_messages import GetSlices as GetSlices
from protocols.messages.round_messages import OpenRound as OpenRound
from protocols.messages.round_messages import Progress as Progress
from protocols.messages.round_messages import ReceiptMessage as ReceiptMessage
from protocols.messages.round_messages import Slices as Slices
from protocols.messages.round_messages import Statements as Statements
from protocols.messages.snapshot_messages import Chunk as Chunk
from protocols.messages.snapshot_messages import GetChunk as GetChunk
from protocols.messages.snapshot_messages import GetState as GetState
from protocols.messages.snapshot_messages import NoChunk as NoChunk
from protocols.messages.snapshot_messages import SnapshotOffer as SnapshotOffer
from protocols.messages.snapshot_messages import SnapshotRoot as SnapshotRoot
from protocols.signed import msgpack_guard
from protocols.signed.peer_record import PeerRecord as PeerRecord

Lane = Literal["data", "group", "bulk"]
"""Purpose of a link: "data" for microbatches, "group" for rounds and membership, "bulk" for long bodies."""

HEADER_LIMIT = 64 * 1024
"""Largest message header in bytes. 4 MB of MessagePack can expand to 296 MB of objects; 64 KiB are harmless.
"""

UNGUARDED_BYTES = 4 * 1024
"""Headers up to this size are decoded without msgpack_guard.py, which takes longer than decoding: their items
are few, and the decoder's own limit of recursion is enough."""

BODY_LIMIT = 64 * 1024 * 1024
"""Largest body in bytes if the receiver knows no tighter bound."""

MESSAGES: tuple[type[Message], ...] = tuple(
    sorted(Message.__subclasses__(), key=lambda kind: int(str(kind.__struct_config__.tag)))
)
"""All messages that the modules above define, in the order of their tags."""

encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
"""Encode a message header as MessagePack bytes."""
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(reduce(or_, MESSAGES))


def decode(data: bytes) -> Message:
    """Return the message of a header that may come from an untrusted peer; its body is not included. Raises
    TooLarge above `HEADER_LIMIT` or a limit of msgpack_guard.py, and Malformed for an invalid one."""
    if len(data) > UNGUARDED_BYTES:
        msgpack_guard.check(data, HEADER_LIMIT)
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a message of this wire version: {error}") from None
