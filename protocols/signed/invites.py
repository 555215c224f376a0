"""Invites: the owner's signed permission to take part in a run whose access is by invite.

The envelope (kind 7, stage -1, round 0) has the time of signing in microseconds as its sequence. An order
revokes an invite by the envelope's id. An invite for one peer is just an envelope that names the peer id.

A bearer invite admits any peer that holds its secret. Its envelope names a public key, and its text carries
the matching secret key. With that, the bearer signs its own peer id. `Hello` and records carry this signature
and never the secret. Another peer cannot reuse the signature, because libp2p authenticates the peer that
shows it.

    named     envelope          (an invite for one peer; begins with the envelope's format, 1)
    shown     2 | bearer's signature 64 B | envelope
    handed    3 | secret 32 B | envelope             (given to the user; never sent to other peers)
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
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, run_bytes, seal
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
"""Maximum size in bytes of an invite in `Hello`, including envelope and bearer's signature."""
SECRET_BYTES = 32
"""Size of an Ed25519 seed."""
_SHOWN, _HANDED = 2, 3
_PREFIX = "swarmnet-invite-1."
_DOMAIN = b"swarmnet bearer 1\0"


class InviteDocument(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="invite"):
    """The signed payload of an invite."""

    peer: Name
    """The peer id that the invite admits; empty for a bearer invite."""
    expires: Number
    """Expiry in seconds since 1970."""
    key: Annotated[bytes, Meta(max_length=PUBLIC_KEY_BYTES)]
    """The public key by which a bearer proves that it holds the invite; empty if the invite names a peer."""


_decoder: msgspec.msgpack.Decoder[InviteDocument] = msgspec.msgpack.Decoder(InviteDocument)


@dataclass(frozen=True, slots=True)
class Invite:
    """A verified invite."""

    id: str
    owner: PeerId
    peer: PeerId | None
    """The admitted peer; None for a bearer invite."""
    expires_seconds: float

    def refusal(self, peer: PeerId, now_seconds: float) -> str | None:
        """Return the reason why the invite does not admit this peer now, or None if it does."""
        if self.peer not in (None, peer):
            return f"the invite is for {self.peer}, not for {peer}"
        if self.expires_seconds < now_seconds:
            return "the invite has expired"
        return None


def seal_invite(
    identity: Identity, run_id: RunId, peer: PeerId | None, expires_seconds: float, now_seconds: float
) -> bytes:
    """Return a new invite to give to the user: for one peer, or with a new secret for any bearer."""
    secret = None if peer else Identity.generate()
    key = b"" if secret is None else secret.public_key
    document = InviteDocument(peer=peer or "", expires=int(expires_seconds), key=key)
    payload, sequence = msgspec.msgpack.encode(document), int(now_seconds * 1e6)
    # An invite belongs to no stage (-1) and no round (0).
    envelope = seal(identity, run_id, EnvelopeKind.INVITE, -1, 0, sequence, payload)
    return envelope if secret is None else bytes([_HANDED]) + secret.seed_bytes() + envelope


def prove_invite(handed: bytes, run_id: RunId, peer: PeerId) -> bytes:
    """Return the proof that `peer` shows in `Hello` and records. `handed` is the invite that the user got. A
    bearer invite is signed for this peer, and its secret left out. An invite for one peer, or an empty one,
    is returned unchanged."""
    if handed[:1] != bytes([_HANDED]):
        return handed
    bearer = Identity.from_seed(handed[1 : 1 + SECRET_BYTES])
    envelope = handed[1 + SECRET_BYTES :]
    return bytes([_SHOWN]) + bearer.sign(_statement(run_id, envelope, peer)) + envelope


def open_invite(shown: bytes, run_id: RunId, owner: PeerId, peer: PeerId) -> Invite:
    """Verify the invite that `peer` shows, and decode it. The caller must still call `Invite.refusal`, which
    checks the expiry and the admitted peer. Raises Malformed, TooLarge or WrongRun. Raises BadSignature if
    the owner did not sign the invite or the bearer did not sign for this peer."""
    bearer_signature, signed_invite = b"", shown
    if shown[:1] == bytes([_SHOWN]):
        bearer_signature, signed_invite = shown[1 : 1 + SIGNATURE_BYTES], shown[1 + SIGNATURE_BYTES :]
    envelope = open_envelope(signed_invite, run_id, EnvelopeKind.INVITE, INVITE_LIMIT - ENVELOPE_BYTES)
    if envelope.sender != owner:
        raise BadSignature(f"the invite is signed by {envelope.sender}, not by the run's owner {owner}")
    msgpack_guard.check(envelope.payload, INVITE_LIMIT)
    try:
        document = _decoder.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"not an invite: {error}") from None
    is_bearer_invite = bool(document.key)
    if bool(document.peer) == is_bearer_invite or len(document.key) not in (0, PUBLIC_KEY_BYTES):
        raise Malformed("an invite names either a peer or a bearer's key")
    if is_bearer_invite != bool(bearer_signature):
        raise Malformed("an invite for any bearer is shown with its signature, one for a peer without")
    if is_bearer_invite:
        statement = _statement(run_id, signed_invite, peer)
        if not verify(peer_id_of(document.key), statement, bearer_signature):
            raise BadSignature(f"the invite is shown by {peer}, and its bearer has not signed that peer id")
    admitted_peer = PeerId(document.peer) if document.peer else None
    return Invite(envelope.id.hex(), envelope.sender, admitted_peer, float(document.expires))


def _statement(run_id: RunId, envelope: bytes, peer: PeerId) -> bytes:
    """Return the statement that a bearer signs. Raises Malformed if `peer` is not an Ed25519 peer id."""
    try:
        key = public_key_bytes(peer)
    except ValueError as error:
        raise Malformed(str(error)) from None
    return _DOMAIN + run_bytes(run_id) + hashlib.sha256(envelope).digest() + key


def invite_text(handed: bytes) -> str:
    """Return an invite as text that users can copy."""
    return _PREFIX + base64.urlsafe_b64encode(handed).decode().rstrip("=")


def invite_bytes(text: str) -> bytes:
    """Return the invite in a copied text, including the secret of a bearer invite. Raises Malformed."""
    text = text.strip()
    try:
        if not text.startswith(_PREFIX):
            raise ValueError(f"it begins with {_PREFIX}")
        body = text.removeprefix(_PREFIX)
        padding = "=" * (-len(body) % 4)  # The text of an invite has none.
        data = base64.b64decode(body + padding, altchars=b"-_", validate=True)
        if not ENVELOPE_BYTES < len(data) <= INVITE_LIMIT or data[0] == _SHOWN:
            raise ValueError(f"{len(data)} bytes")
    except (ValueError, binascii.Error) as error:
        raise Malformed(f"{text[:40]!r} is not an invite ({error})") from None
    return data
