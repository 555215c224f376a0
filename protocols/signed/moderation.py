"""Bans by moderators: a document that several of the keys in a run's manifest have signed.

It has all bans of the moderators, as an order has all of the owner's; the newest one is valid. Each signature
is an ordinary envelope (kind 10, stage -1, round 0) around the same payload, which is written once. So a
signature names its run, and its sequence is the time of signing the first one, in microseconds.

    2 u8 | needed u8 | moderators u8 | their public keys 32 B each, sorted | signatures u8
    | an envelope without its payload, 120 B, for each signature | payload

The moderators have a *joint id* in the form of a peer id, a hash of their keys. It takes the place of the
owner where an order is looked up or compared, so that a directory node needs no manifest to verify it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from protocols.errors import BadSignature, Malformed, TooLarge
from protocols.fields import Name
from protocols.signed import msgpack_guard
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, claimed, open_envelope, seal
from protocols.signed.identity import PUBLIC_KEY_BYTES, Identity, peer_id_of, public_key_bytes
from protocols.signed.orders import SignedOrder, Text
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.owner_orders import ORDER_LIMIT, Ban, OwnerOrders
from swarmnet.run.schema import MAX_MODERATORS, Moderators

MODERATED = 2
"""First byte of a moderation; an envelope begins with its format, 1."""
_PREFIX = "swarmnet-moderation-1."
_HEAD_BYTES = 3


class ModerationDocument(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="moderation"):
    """The signed payload."""

    reason: Text
    bans: list[tuple[Name, Text]]


_decoder: msgspec.msgpack.Decoder[ModerationDocument] = msgspec.msgpack.Decoder(ModerationDocument)


@dataclass(frozen=True, slots=True)
class Moderation:
    """A verified document, which enough moderators may or may not have signed."""

    moderators: Moderators
    order: OwnerOrders
    """Sequence, reason and bans; all else has its default."""
    signers: tuple[PeerId, ...]
    data: bytes

    @property
    def missing(self) -> int:
        return self.moderators.needed - len(self.signers)


def joint_id(moderators: Moderators) -> PeerId:
    return peer_id_of(hashlib.sha256(b"swarmnet moderators 1\0" + _describe(moderators)).digest())


def _describe(moderators: Moderators) -> bytes:
    """Return the number of signatures needed, the number of keys, and the keys. Raises ValueError for an
    invalid peer id."""
    keys = sorted(map(public_key_bytes, moderators.keys))
    return bytes((moderators.needed, len(keys))) + b"".join(keys)


def begin_moderation(
    identity: Identity, run_id: RunId, moderators: Moderators, order: OwnerOrders
) -> Moderation:
    """Return the bans in `order` with the signature of one moderator. Raises BadSignature if the key is none
    of the moderators', and TooLarge above `ORDER_LIMIT` bytes."""
    document = ModerationDocument(order.reason, [(ban.peer, ban.reason) for ban in order.bans])
    payload = msgspec.msgpack.encode(document)
    head = seal(identity, run_id, EnvelopeKind.MODERATION, -1, 0, order.sequence, payload)[:ENVELOPE_BYTES]
    return open_moderation(_write(moderators, [head], payload), run_id)


def add_signature(identity: Identity, run_id: RunId, begun: Moderation) -> Moderation:
    """Return the document with one more signature. Raises BadSignature if the key is none of the moderators',
    and Malformed if it has signed already."""
    _, heads, payload = _split(begun.data)
    sealed = seal(identity, run_id, EnvelopeKind.MODERATION, -1, 0, begun.order.sequence, payload)
    return open_moderation(_write(begun.moderators, [*heads, sealed[:ENVELOPE_BYTES]], payload), run_id)


def _write(moderators: Moderators, heads: Sequence[bytes], payload: bytes) -> bytes:
    by_signer = sorted((_signer_of(head), head) for head in heads)
    signatures = bytes([len(heads)]) + b"".join(head for _, head in by_signer)
    return bytes([MODERATED]) + _describe(moderators) + signatures + payload


def _signer_of(head: bytes) -> PeerId:
    """Return who claims to have signed."""
    return claimed(head)[0]


def _split(data: bytes) -> tuple[Moderators, list[bytes], bytes]:
    """Return the moderators that a document names, its envelopes without payload, and the payload. Raises
    Malformed or TooLarge."""
    if len(data) > ORDER_LIMIT:
        raise TooLarge(f"a moderation of {len(data)} bytes; at most {ORDER_LIMIT} are allowed")
    if len(data) <= _HEAD_BYTES or data[0] != MODERATED:
        raise Malformed("not a moderation")
    needed, count = data[1], data[2]
    keys_end = _HEAD_BYTES + count * PUBLIC_KEY_BYTES
    if not 1 <= needed <= count <= MAX_MODERATORS or len(data) <= keys_end:
        raise Malformed(f"a moderation of {count} moderators, of which {needed} must sign")
    keys = [
        data[start : start + PUBLIC_KEY_BYTES] for start in range(_HEAD_BYTES, keys_end, PUBLIC_KEY_BYTES)
    ]
    if keys != sorted(set(keys)):
        raise Malformed("a moderation whose moderators are not sorted, or named twice")
    payload_start = keys_end + 1 + data[keys_end] * ENVELOPE_BYTES
    if data[keys_end] > needed or len(data) <= payload_start:
        raise Malformed(f"a moderation with {data[keys_end]} signatures, of which {needed} are needed")
    heads = [
        data[start : start + ENVELOPE_BYTES] for start in range(keys_end + 1, payload_start, ENVELOPE_BYTES)
    ]
    return Moderators(tuple(map(peer_id_of, keys)), needed), heads, data[payload_start:]


def open_moderation(data: bytes, run_id: RunId, moderators: Moderators | None = None) -> Moderation:
    """Verify a document, however many have signed it, and decode it. If `moderators` is given, a document of
    others is refused. Raises Malformed, TooLarge, WrongRun or BadSignature."""
    data = bytes(data)
    named, heads, payload = _split(data)
    if moderators is not None and _describe(moderators) != _describe(named):
        raise BadSignature("a moderation of other moderators than the run's manifest names")
    signers = list(map(_signer_of, heads))
    for signer in signers:
        if signer not in named.keys:
            raise BadSignature(f"a moderation signed by {signer}, which is none of the run's moderators")
    if len(set(signers)) < len(signers):
        raise Malformed(f"a moderation that one moderator has signed twice: {', '.join(signers)}")
    if signers != sorted(signers) or not signers:
        raise Malformed("a moderation without a signature, or with signatures that are not sorted")
    opened = [open_envelope(head + payload, run_id, EnvelopeKind.MODERATION, ORDER_LIMIT) for head in heads]
    sequences = {envelope.sequence for envelope in opened}
    if len(sequences) > 1 or 0 in sequences or any((one.stage, one.round) != (-1, 0) for one in opened):
        raise Malformed("a moderation with a stage or round, or whose signatures differ in their sequence")
    msgpack_guard.check(payload, ORDER_LIMIT)
    try:
        document = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"not a moderation: {error}") from None
    if not all(text.isprintable() for text in (document.reason, *(why for _, why in document.bans))):
        raise Malformed("a moderation whose reason is not one line of text")
    bans = tuple(Ban(PeerId(peer), why, by="moderators") for peer, why in document.bans)
    order = OwnerOrders(sequence=sequences.pop(), reason=document.reason, bans=bans)
    return Moderation(named, order, tuple(signers), data)


def open_complete(data: bytes, run_id: RunId, moderators: Moderators | None = None) -> SignedOrder:
    """Verify a document as `open_moderation` does, and that enough moderators have signed it."""
    opened = open_moderation(data, run_id, moderators)
    if opened.missing:
        needed = opened.moderators.needed
        raise BadSignature(f"a moderation signed by {len(opened.signers)} moderators; {needed} must sign")
    return SignedOrder(opened.order, joint_id(opened.moderators), opened.data)


def moderation_text(moderation: Moderation) -> str:
    """Return a document as a line that people can copy."""
    return _PREFIX + base64.urlsafe_b64encode(moderation.data).decode().rstrip("=")


def moderation_bytes(text: str) -> bytes:
    """Return the document in a copied line. Raises Malformed."""
    body = text.strip().removeprefix(_PREFIX)
    try:
        if body == text.strip():
            raise ValueError(f"it begins with {_PREFIX}")
        return base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error) as error:
        raise Malformed(f"{text.strip()[:40]!r} is no signed ban ({error})") from None
