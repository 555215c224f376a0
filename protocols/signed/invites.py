"""Invites: the owner's signed word that somebody may take part in a run whose access is by invite.

The envelope (kind 7, stage -1, round 0) has the time of signing in microseconds as its sequence; its id is
how an order revokes it. A bearer's invite is as good as its secrecy: every peer that it is shown to could use
it.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from protocols.errors import BadSignature, Malformed
from protocols.fields import Name, Number
from protocols.signed import msgpack_guard
from protocols.signed.envelope import ENVELOPE_BYTES, Kind, open_envelope, seal
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId, RunId

INVITE_LIMIT = 256
"""Bytes, envelope included: what Hello carries."""
_PREFIX = "swarmnet-invite-1."


class InviteDocument(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="invite"):
    peer: Name
    """Whom it lets in; empty: whoever shows it."""
    expires: Number
    """Seconds since 1970."""


_decoder: msgspec.msgpack.Decoder[InviteDocument] = msgspec.msgpack.Decoder(InviteDocument)


@dataclass(frozen=True, slots=True)
class Invite:
    """A verified invite."""

    id: str
    owner: PeerId
    peer: PeerId | None
    """None: the bearer."""
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
    payload = msgspec.msgpack.encode(InviteDocument(peer or "", int(expires_seconds)))
    return seal(identity, run_id, Kind.INVITE, -1, 0, int(now_seconds * 1e6), payload)


def open_invite(data: bytes, run_id: RunId, owner: PeerId) -> Invite:
    """Verify, then decode. Raises Malformed, TooLarge, WrongRun or BadSignature."""
    envelope = open_envelope(data, run_id, Kind.INVITE, INVITE_LIMIT - ENVELOPE_BYTES)
    if envelope.sender != owner:
        raise BadSignature(f"the invite is signed by {envelope.sender}, not by the run's owner {owner}")
    msgpack_guard.check(envelope.payload, INVITE_LIMIT)
    try:
        document = _decoder.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"not an invite: {error}") from None
    peer = PeerId(document.peer) if document.peer else None
    return Invite(envelope.id.hex(), envelope.sender, peer, float(document.expires))


def invite_text(data: bytes) -> str:
    """As people hand it on."""
    return _PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")


def invite_bytes(text: str) -> bytes:
    """The envelope in what people handed on. Raises Malformed."""
    text = text.strip()
    try:
        if not text.startswith(_PREFIX):
            raise ValueError(f"it begins with {_PREFIX}")
        body = text.removeprefix(_PREFIX)
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        if not ENVELOPE_BYTES < len(data) <= INVITE_LIMIT:
            raise ValueError(f"{len(data)} bytes")
    except (ValueError, binascii.Error) as error:
        raise Malformed(f"{text[:40]!r} is not an invite ({error})") from None
    return data


