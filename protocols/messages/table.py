"""Every message as a typed struct. Control is MessagePack arrays, tensors and files travel as the body.

Messages are one-way: a reply is a message of its own, sent over the other side's link, and matched by
what it names (a microbatch, a contribution id, a chunk). Anything may be lost; deadlines are the
sender's. docs/wire.md holds the table. Durations in seconds, sizes in bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocols.errors import Malformed
from protocols.inference_messages import AskForward as AskForward
from protocols.inference_messages import Declined as Declined
from protocols.inference_messages import Forwarded as Forwarded
from protocols.membership_messages import AskManifest as AskManifest
from protocols.membership_messages import Beat as Beat
from protocols.membership_messages import Bye as Bye
from protocols.membership_messages import Hello as Hello
from protocols.membership_messages import Known as Known
from protocols.membership_messages import ManifestIs as ManifestIs
from protocols.membership_messages import Refuse as Refuse
from protocols.message_fields import Message as Message
from protocols.message_fields import Path as Path
from protocols.microbatch_messages import NO_ATTEMPT as NO_ATTEMPT
from protocols.microbatch_messages import Act as Act
from protocols.microbatch_messages import Busy as Busy
from protocols.microbatch_messages import Cancel as Cancel
from protocols.microbatch_messages import Credit as Credit
from protocols.microbatch_messages import Grad as Grad
from protocols.microbatch_messages import Nack as Nack
from protocols.order_messages import OrderIs as OrderIs
from protocols.peer_record import PeerRecord as PeerRecord
from protocols.receipt_messages import ReceiptIs as ReceiptIs
from protocols.round_messages import MOST_STATEMENTS as MOST_STATEMENTS
from protocols.round_messages import Announce as Announce
from protocols.round_messages import AskChain as AskChain
from protocols.round_messages import AskIds as AskIds
from protocols.round_messages import ChainIs as ChainIs
from protocols.round_messages import Contribution as Contribution
from protocols.round_messages import OpenRound as OpenRound
from protocols.round_messages import Progress as Progress
from protocols.round_messages import Reference as Reference
from protocols.round_messages import Statements as Statements
from protocols.round_messages import Want as Want
from protocols.scouting_messages import Ask as Ask
from protocols.scouting_messages import Held as Held
from protocols.scouting_messages import Place as Place
from protocols.scouting_messages import Prospect as Prospect
from protocols.snapshot_messages import AskChunk as AskChunk
from protocols.snapshot_messages import AskState as AskState
from protocols.snapshot_messages import Chunk as Chunk
from protocols.snapshot_messages import NoChunk as NoChunk
from protocols.snapshot_messages import SnapshotRoot as SnapshotRoot
from protocols.snapshot_messages import State as State

Lane = Literal["data", "group", "bulk"]
"""What a link is for: microbatches; rounds and membership; snapshots and other long bodies."""

HEADER_LIMIT = 64 * 1024
"""Largest message header in bytes: 4 MB of MessagePack can become 296 MB of objects, 64 KiB cannot hurt."""

BODY_LIMIT = 64 * 1024 * 1024
"""The longest body where the receiver knows no better bound."""

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
