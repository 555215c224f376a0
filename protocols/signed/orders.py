"""Orders of the run's owner on the wire, in the DHT and on disk: signed documents that prove their owner."""

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
    EnvelopeKind,
    open_envelope,
    seal,
)
from protocols.signed.identity import Identity, public_key_bytes
from swarmnet.identifiers import PeerId, RunId
from swarmnet.lineage import Return
from swarmnet.run.mixtures import LARGEST_WEIGHT, MAX_MIXTURES, MAX_SOURCES, MixtureChange
from swarmnet.run.owner_orders import ORDER_LIMIT, REASON_LIMIT, Ban, OwnerOrders, Withdrawal
from swarmnet.run.rates import LARGEST_FACTOR, MAX_RATES, RateChange

ORDER_SECONDS = 600.0
"""How long a stored order lives; all peers of the run that have it store it again."""
_PUBLIC_KEY_OFFSET = 10
"""Offset of the public key in an envelope (docs/wire.md 5)."""
Text = Annotated[str, Meta(max_length=REASON_LIMIT)]
Sha256 = Annotated[bytes, Meta(min_length=32, max_length=32)]
InviteId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Factor = Annotated[int, Meta(ge=1, le=LARGEST_FACTOR)]
StoredRound = Annotated[int, Meta(ge=0, lt=2**32)]
"""A round that has a snapshot."""
HexDigest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


Shares = Annotated[
    tuple[tuple[Name, Annotated[int, Meta(ge=0, le=LARGEST_WEIGHT)]], ...],
    Meta(min_length=1, max_length=MAX_SOURCES),
]
"""Pairs of a source's name and its weight in thousandths."""


class OrderDocument(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="order"):
    """The payload of an order's envelope. Its sequence is the envelope's."""

    reason: Text
    paused: bool
    checkpoint: Number
    bans: list[tuple[Name, Text]]
    withdrawn: list[tuple[Sha256, Text]]
    revoked: list[InviteId]
    chains: Any = None
    """A retired field, always nil; a shorter array may end before it. Orders made before 2026-11-24 could
    have a value here."""
    rates: Annotated[tuple[tuple[RoundNumber, Factor], ...], Meta(max_length=MAX_RATES)] = ()
    """Pairs of (first round, learning-rate factor in thousandths). A shorter array may end before them."""
    ends: RoundNumber | None = None
    """The last round of the run; nil if there is none."""
    mixtures: Annotated[tuple[tuple[RoundNumber, Shares], ...], Meta(max_length=MAX_MIXTURES)] = ()
    """Pairs of (first round, shares of the sources). A shorter array may end before them."""
    dismissed: bool = False
    """Whether bans by moderators do not count. A shorter array may end before it."""
    rollbacks: tuple[Name, ...] = ()
    """Banned peers whose contributions leave the open rounds. A shorter array may end before them."""
    returned: tuple[Number, tuple[tuple[StoredRound, HexDigest], ...]] | None = None
    """A return to snapshots: its number, and the round and digest of each stage's snapshot. A shorter array
    may end before it."""


_decoder: msgspec.msgpack.Decoder[OrderDocument] = msgspec.msgpack.Decoder(OrderDocument)


@dataclass(frozen=True, slots=True)
class SignedOrder:
    """A verified order."""

    order: OwnerOrders
    owner: PeerId
    """The owner, or the joint id of the moderators (moderation.py)."""
    data: bytes
    """The signed bytes."""

    def newer_than(self, other: SignedOrder | None) -> bool:
        """Return True if this order replaces `other`. Two orders with one sequence, made on two machines at
        once, are ordered by their bytes. Thus all peers choose the same one."""
        return other is None or (self.order.sequence, self.data) > (other.order.sequence, other.data)


def seal_order(identity: Identity, run_id: RunId, order: OwnerOrders) -> SignedOrder:
    """Sign an order of the run's owner. Returns it as other peers will read it.

    Raises TooLarge above `ORDER_LIMIT` bytes. The owner should then drop bans of peers, or withdrawals of
    documents, that no longer matter."""
    document = OrderDocument(
        reason=order.reason,
        paused=order.paused,
        checkpoint=order.checkpoint,
        bans=[(ban.peer, ban.reason) for ban in order.bans],
        withdrawn=[(bytes.fromhex(each.document), each.reason) for each in order.withdrawn],
        revoked=[bytes.fromhex(invite) for invite in order.revoked],
        chains=None,  # A retired field.
        rates=tuple((rate.from_round, rate.factor) for rate in order.rates),
        ends=order.ends,
        mixtures=tuple((change.from_round, change.weights) for change in order.mixtures),
        dismissed=order.dismissed,
        rollbacks=tuple(ban.peer for ban in order.bans if ban.rolls_back),
        returned=(order.returned.number, order.returned.points) if order.returned is not None else None,
    )
    payload = _encode(document)
    size = len(payload) + ENVELOPE_BYTES
    if size > ORDER_LIMIT:
        raise TooLarge(f"an order of {size} bytes; at most {ORDER_LIMIT} are allowed")
    # An order belongs to no stage (-1) and no round (0).
    data = seal(identity, run_id, EnvelopeKind.ORDER, -1, 0, order.sequence, payload)
    return open_order(data, run_id, PeerId(identity.peer_id))


def _encode(document: OrderDocument) -> bytes:
    """Encode an order. Older programs refuse an array that has fields added later, so the array ends before
    those that the order does not use."""
    fields: list[object] = msgspec.to_builtins(document, builtin_types=(bytes,))
    for value in (document.returned, document.rollbacks, document.dismissed, document.mixtures):
        if value:
            return msgspec.msgpack.encode(fields)
        del fields[-1]
    if not document.rates and document.ends is None:
        del fields[-2:]
    return msgspec.msgpack.encode(fields)


def open_order(data: bytes, run_id: RunId, owner: PeerId | None = None) -> SignedOrder:
    """Verify an order and decode it. If `owner` is given, an order of another signer is refused before its
    signature is checked. Raises Malformed, TooLarge, WrongRun or BadSignature."""
    if owner is not None and data[_PUBLIC_KEY_OFFSET : _PUBLIC_KEY_OFFSET + 32] != public_key_bytes(owner):
        raise BadSignature(f"an order that is not signed by the run's owner {owner}")
    envelope = open_envelope(data, run_id, EnvelopeKind.ORDER, ORDER_LIMIT - ENVELOPE_BYTES)
    msgpack_guard.check(envelope.payload, ORDER_LIMIT)
    try:
        document = _decoder.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"not an order: {error}") from None
    if envelope.stage != -1 or envelope.round != 0 or envelope.sequence == 0:
        raise Malformed("an order with a stage or round, or without a sequence")
    if document.chains is not None:
        raise Malformed("chains are no longer spoken; the owner has to give the order again")
    if set(document.rollbacks) - {peer for peer, _ in document.bans}:
        raise Malformed("an order that takes contributions of a peer out of rounds without banning it")
    texts = [document.reason, *(why for _, why in document.bans), *(why for _, why in document.withdrawn)]
    if not all(text.isprintable() for text in texts):
        raise Malformed("an order whose reason is not one line of text")
    order = OwnerOrders(
        sequence=envelope.sequence,
        reason=document.reason,
        paused=document.paused,
        checkpoint=document.checkpoint,
        bans=tuple(
            Ban(PeerId(peer), why, rolls_back=peer in document.rollbacks) for peer, why in document.bans
        ),
        withdrawn=tuple(Withdrawal(digest.hex(), why) for digest, why in document.withdrawn),
        revoked=tuple(invite.hex() for invite in document.revoked),
        rates=tuple(RateChange(from_round, factor) for from_round, factor in document.rates),
        ends=document.ends,
        mixtures=tuple(MixtureChange(first, weights) for first, weights in document.mixtures),
        dismissed=document.dismissed,
        returned=Return(*document.returned) if document.returned is not None else None,
    )
    return SignedOrder(order, envelope.sender, bytes(data))
