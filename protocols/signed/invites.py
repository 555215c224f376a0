"""Invites: the owner's signed permission to take part in a run whose access is by invite.

The envelope (kind 7, stage -1, round 0) has the time of signing in microseconds as its sequence; its id is
how an order revokes it. An invite for one peer names that peer's id, and its envelope is all there is. An
invite for any bearer names a public key that was made with it. Its text carries the secret half, and the
bearer signs its own peer id with that. Greetings and records carry this signature, never the secret: what a
peer shows is worth nothing to another peer, for libp2p proves which peer shows it.

    named     envelope                               (begins with the envelope's format, 1)
    shown     2 | bearer's signature 64 B | envelope
    handed    3 | secret 32 B | envelope             (what the owner hands on; it never travels)
    statement domain | run id 32 B | SHA-256 of the envelope | public key of the peer that shows it 32 B
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from protocols.errors import BadSignature, Malformed
from protocols.fields import Name, Number
from protocols.signed import msgpack_guard
from protocols.signed.envelope import ENVELOPE_BYTES, Kind, open_envelope, run_bytes, seal
from protocols.signed.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    peer_id_of,
    public_key_bytes,
    verify,
)
from swarmnet.identifiers import PeerId, RunId

INVITE_LIMIT = 256
"""Bytes of an invite as it is shown, envelope and bearer's signature included: what Hello carries."""
SECRET_BYTES = 32
"""Of an Ed25519 seed."""
_SHOWN, _HANDED = 2, 3
_PREFIX = "swarmnet-invite-1."
_DOMAIN = b"swarmnet bearer 1\0"


class InviteDocument(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="invite"):
    peer: Name
    """The peer id that it lets in; empty: any bearer."""
    expires: Number
    """Seconds since 1970."""
    key: Annotated[bytes, Meta(max_length=PUBLIC_KEY_BYTES)]
    """The public key by which a bearer proves that it has the invite; empty where a peer is named."""


_decoder: msgspec.msgpack.Decoder[InviteDocument] = msgspec.msgpack.Decoder(InviteDocument)


@dataclass(frozen=True, slots=True)
class Invite:
    """A verified invite."""

    id: str
    owner: PeerId
    peer: PeerId | None
    """None: any bearer."""
    expires_seconds: float

    def refusal(self, peer: PeerId, now_seconds: float) -> str | None:
        """Why it does not let this peer in now; None: it does."""
        if self.peer not in (None, peer):
            return f"the invite is for {self.peer}, not for {peer}"
        if self.expires_seconds < now_seconds:
            return "the invite has expired"
        return None


def seal_invite(
    identity: Identity, run_id: RunId, peer: PeerId | None, expires_seconds: float, now_seconds: float
) -> bytes:
    """An invite as the owner hands it on: for one peer, or with a new secret for any bearer."""
    secret = None if peer else Identity.generate()
    document = InviteDocument(peer or "", int(expires_seconds), b"" if secret is None else secret.public_key)
    payload = msgspec.msgpack.encode(document)
    envelope = seal(identity, run_id, Kind.INVITE, -1, 0, int(now_seconds * 1e6), payload)
    return envelope if secret is None else bytes([_HANDED]) + secret.seed_bytes() + envelope


def prove_invite(handed: bytes, run_id: RunId, peer: PeerId) -> bytes:
    """What `peer` shows of an invite that was handed to it, in greetings and records: without the secret, and
    signed for this peer. An invite for one peer, or none (empty), stays what it is."""
    if handed[:1] != bytes([_HANDED]):
        return handed
    bearer = Identity.from_seed(handed[1 : 1 + SECRET_BYTES])
    envelope = handed[1 + SECRET_BYTES :]
    return bytes([_SHOWN]) + bearer.sign(_statement(run_id, envelope, peer)) + envelope


def open_invite(shown: bytes, run_id: RunId, owner: PeerId, peer: PeerId) -> Invite:
    """Verify what `peer` shows, then decode. Whom the invite is for and when it ends is the caller's to check
    (`Invite.refusal`). Raises Malformed, TooLarge, WrongRun, or BadSignature where the owner has not signed
    it or the bearer has not proved it for this peer."""
    signature, data = b"", shown
    if shown[:1] == bytes([_SHOWN]):
        signature, data = shown[1 : 1 + SIGNATURE_BYTES], shown[1 + SIGNATURE_BYTES :]
    envelope = open_envelope(data, run_id, Kind.INVITE, INVITE_LIMIT - ENVELOPE_BYTES)
    if envelope.sender != owner:
        raise BadSignature(f"the invite is signed by {envelope.sender}, not by the run's owner {owner}")
    msgpack_guard.check(envelope.payload, INVITE_LIMIT)
    try:
        document = _decoder.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"not an invite: {error}") from None
    if bool(document.peer) == bool(document.key) or len(document.key) not in (0, PUBLIC_KEY_BYTES):
        raise Malformed("an invite names either a peer or a bearer's key")
    if bool(document.key) != bool(signature):
        raise Malformed("an invite for any bearer is shown with its signature, one for a peer without")
    if document.key and not verify(peer_id_of(document.key), _statement(run_id, data, peer), signature):
        raise BadSignature(f"the invite is shown by {peer}, and its bearer has not signed that peer id")
    named = PeerId(document.peer) if document.peer else None
    return Invite(envelope.id.hex(), envelope.sender, named, float(document.expires))


def _statement(run_id: RunId, envelope: bytes, peer: PeerId) -> bytes:
    """What a bearer signs. Raises Malformed where `peer` is no Ed25519 peer id."""
    try:
        key = public_key_bytes(peer)
    except ValueError as error:
        raise Malformed(str(error)) from None
    return _DOMAIN + run_bytes(run_id) + hashlib.sha256(envelope).digest() + key


def invite_text(handed: bytes) -> str:
    """The text of an invite, as people hand it on."""
    return _PREFIX + base64.urlsafe_b64encode(handed).decode().rstrip("=")


def invite_bytes(text: str) -> bytes:
    """The invite in a text that people handed on, with the secret of one for any bearer. Raises Malformed."""
    text = text.strip()
    try:
        if not text.startswith(_PREFIX):
            raise ValueError(f"it begins with {_PREFIX}")
        body = text.removeprefix(_PREFIX)
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        if not ENVELOPE_BYTES < len(data) <= INVITE_LIMIT or data[0] == _SHOWN:
            raise ValueError(f"{len(data)} bytes")
    except (ValueError, binascii.Error) as error:
        raise Malformed(f"{text[:40]!r} is not an invite ({error})") from None
    return data
