"""Orders on the wire, in the directory and on disk: a signed document that proves whose it is.

In the directory an order stands under a key made of the run id *and* the owner's public key. A node that
keeps it need not know the run's manifest: whoever signs with another key only ever fills another place, where
nobody looks, since readers know the owner from the manifest. So the proof of ownership costs no byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from protocols.errors import BadSignature, Malformed, TooLarge
from protocols.fields import Name, Number, RoundNumber
from protocols.signed import msgpack_guard
from protocols.signed.envelope import (
    ENVELOPE_BYTES,
    FORMAT,
    RUN_ID_BYTES,
    Kind,
    open_envelope,
    run_bytes,
    seal,
)
from protocols.signed.identity import Identity, public_key_bytes
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.owner_orders import ORDER_LIMIT, REASON_LIMIT, Ban, Order, Withdrawal
from swarmnet.run.rates import LARGEST_FACTOR, MOST_RATES, Rate

ORDER_SECONDS = 600.0
"""A stored order's life; everybody in the run who has it stores it again."""
STORED_ORDER_LIMIT = RUN_ID_BYTES + ORDER_LIMIT
_KEY_AT = 10
"""Offset of the public key in an envelope (docs/wire.md 5)."""
Text = Annotated[str, Meta(max_length=REASON_LIMIT)]
Sha256 = Annotated[bytes, Meta(min_length=32, max_length=32)]
InviteId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Factor = Annotated[int, Meta(ge=1, le=LARGEST_FACTOR)]


class OrderDocument(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="order"):
    """The payload of an order's envelope; its sequence is the envelope's."""

    reason: Text
    paused: bool
    checkpoint: Number
    bans: list[tuple[Name, Text]]
    withdrawn: list[tuple[Sha256, Text]]
    revoked: list[InviteId]
    chains: Any = None
    """Nil, or an array that ends before it. Orders of before 2026-11-24 could have something here."""
    rates: Annotated[tuple[tuple[RoundNumber, Factor], ...], Meta(max_length=MOST_RATES)] = ()
    """From which round on, and by how many thousandths, as they were given. The array may end before them."""
    ends: RoundNumber | None = None
    """The last round; nil: none."""


_ADDED = 2
"""Fields that came later: older programs refuse an array that has them, so one without them ends before."""
_decoder: msgspec.msgpack.Decoder[OrderDocument] = msgspec.msgpack.Decoder(OrderDocument)


@dataclass(frozen=True, slots=True)
class SignedOrder:
    """A verified order."""

    order: Order
    owner: PeerId
    data: bytes
    """The envelope."""

    def newer_than(self, other: SignedOrder | None) -> bool:
        """Of two with one sequence, made on two machines at once, everybody takes the same."""
        return other is None or (self.order.sequence, self.data) > (other.order.sequence, other.data)


def seal_order(identity: Identity, run_id: RunId, order: Order) -> SignedOrder:
    """Sign an order. TooLarge if it does not fit: then bans or withdrawals that no longer matter must go."""
    document = OrderDocument(
        order.reason,
        order.paused,
        order.checkpoint,
        [(ban.peer, ban.reason) for ban in order.bans],
        [(bytes.fromhex(withdrawal.document), withdrawal.reason) for withdrawal in order.withdrawn],
        [bytes.fromhex(invite) for invite in order.revoked],
        None,
        tuple((rate.from_round, rate.factor) for rate in order.rates),
        order.ends,
    )
    payload = _encode(document)
    size = len(payload) + ENVELOPE_BYTES
    if size > ORDER_LIMIT:
        raise TooLarge(f"an order of {size} bytes; at most {ORDER_LIMIT} are allowed")
    data = seal(identity, run_id, Kind.ORDER, -1, 0, order.sequence, payload)
    return open_order(data, run_id, PeerId(identity.peer_id))


def _encode(document: OrderDocument) -> bytes:
    fields: list[object] = msgspec.to_builtins(document, builtin_types=(bytes,))
    needed = bool(document.rates) or document.ends is not None
    return msgspec.msgpack.encode(fields if needed else fields[:-_ADDED])


def open_order(data: bytes, run_id: RunId, owner: PeerId | None = None) -> SignedOrder:
    """Verify, then decode. `owner`: whose it must be; that is looked at before the signature.

    Raises Malformed, TooLarge, WrongRun or BadSignature."""
    if owner is not None and data[_KEY_AT : _KEY_AT + 32] != public_key_bytes(owner):
        raise BadSignature(f"an order that is not signed by the run's owner {owner}")
    envelope = open_envelope(data, run_id, Kind.ORDER, ORDER_LIMIT - ENVELOPE_BYTES)
    msgpack_guard.check(envelope.payload, ORDER_LIMIT)
    try:
        document = _decoder.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"not an order: {error}") from None
    if envelope.stage != -1 or envelope.round != 0 or envelope.sequence == 0:
        raise Malformed("an order with a stage or round, or without a sequence")
    if document.chains is not None:
        raise Malformed("chains are no longer spoken; the owner has to give the order again")
    texts = [document.reason, *(why for _, why in document.bans), *(why for _, why in document.withdrawn)]
    if not all(text.isprintable() for text in texts):
        raise Malformed("an order whose reason is not one line of text")
    order = Order(
        envelope.sequence,
        document.reason,
        document.paused,
        document.checkpoint,
        tuple(Ban(PeerId(peer), why) for peer, why in document.bans),
        tuple(Withdrawal(digest.hex(), why) for digest, why in document.withdrawn),
        tuple(invite.hex() for invite in document.revoked),
        tuple(Rate(from_round, factor) for from_round, factor in document.rates),
        document.ends,
    )
    return SignedOrder(order, envelope.sender, bytes(data))


def order_key(run_id: RunId, owner: PeerId) -> bytes:
    return b"swarmnet order 1\0" + run_bytes(run_id) + public_key_bytes(owner)


def stored_order(run_id: RunId, data: bytes) -> bytes:
    """As the directory keeps it: with the run id, so that any node can check it."""
    return run_bytes(run_id) + data


def is_stored_order(content: bytes) -> bool:
    """Told from a manifest, which is JSON, by two bytes that no JSON has there."""
    return content[RUN_ID_BYTES : RUN_ID_BYTES + 2] == bytes((FORMAT, Kind.ORDER))


def open_stored_order(content: bytes) -> tuple[RunId, SignedOrder]:
    """Raises as `open_order` does."""
    run_id = RunId(content[:RUN_ID_BYTES].hex())
    return run_id, open_order(content[RUN_ID_BYTES:], run_id)
