"""Signed opinions of third persons about a run: endorsements, and objections to documents of its text.

Anyone may sign an opinion with a key of their own. A reader chooses whose endorsements it trusts. An
objection names a document and a reason, for the run's owner; its key may be made for it alone, so that it is
anonymous. In the DHT, all opinions of one kind about one run are under one key. The subkey is the author and
a hash of what it is about. A newer opinion of the same author replaces an older one, and may withdraw it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from protocols.errors import Malformed
from protocols.signed import msgpack_guard
from protocols.signed.envelope import (
    ENVELOPE_BYTES,
    RUN_ID_BYTES,
    EnvelopeKind,
    open_envelope,
    run_bytes,
    seal,
)
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.owner_orders import REASON_LIMIT

OPINION_LIMIT = 1024
"""Maximum size in bytes of a stored opinion, including run id and envelope. Two lines of 200 characters fit
unless most of them take three bytes or more."""
OPINION_SECONDS = 30 * 86400.0
"""Life of an opinion in seconds, from its signing. Authors are seldom online to store it again."""
OpinionKind = Literal["endorsement", "objection"]
Line = Annotated[str, Meta(max_length=REASON_LIMIT)]


class OpinionDocument(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="opinion"):
    """The payload of an opinion's envelope."""

    document: Line
    """The document objected to: its SHA-256, or where it is found. Empty: the run is endorsed."""
    text: Line
    withdrawn: bool = False


_decoder: msgspec.msgpack.Decoder[OpinionDocument] = msgspec.msgpack.Decoder(OpinionDocument)


@dataclass(frozen=True, slots=True)
class SignedOpinion:
    """A verified opinion."""

    run_id: RunId
    author: PeerId
    document: str
    text: str
    withdrawn: bool
    sequence: int
    """Time of signing in microseconds since 1970."""
    data: bytes
    """The run id and the signed envelope, as stored."""

    @property
    def kind(self) -> OpinionKind:
        return "objection" if self.document else "endorsement"

    @property
    def expires_seconds(self) -> float:
        """The expiry in swarm time, seconds since 1970."""
        return self.sequence / 1e6 + OPINION_SECONDS

    @property
    def subkey(self) -> str:
        """What stands for the author's opinion on this document of this run, under the key of its kind."""
        about = hashlib.sha256(run_bytes(self.run_id) + self.document.encode()).hexdigest()
        return f"{self.author} {about[:16]}"


def seal_opinion(
    identity: Identity, run_id: RunId, document: OpinionDocument, now_seconds: float
) -> SignedOpinion:
    """Sign an opinion at `now_seconds`, the swarm's time. Raises TooLarge or Malformed."""
    # An opinion belongs to no stage (-1) and no round (0).
    sequence = int(now_seconds * 1e6)
    payload = msgspec.msgpack.encode(document)
    data = seal(identity, run_id, EnvelopeKind.OPINION, -1, 0, sequence, payload)
    return open_opinion(run_bytes(run_id) + data)


def open_opinion(content: bytes) -> SignedOpinion:
    """Verify a stored opinion, not its age. Raises Malformed, TooLarge, WrongRun or BadSignature."""
    run_id = RunId(content[:RUN_ID_BYTES].hex())
    limit = OPINION_LIMIT - RUN_ID_BYTES - ENVELOPE_BYTES
    envelope = open_envelope(content[RUN_ID_BYTES:], run_id, EnvelopeKind.OPINION, limit)
    msgpack_guard.check(envelope.payload, OPINION_LIMIT)
    try:
        document = _decoder.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"not an opinion: {error}") from None
    if envelope.stage != -1 or envelope.round != 0 or envelope.sequence == 0:
        raise Malformed("an opinion with a stage or round, or without a time")
    if not (document.document.isprintable() and document.text.isprintable()):
        raise Malformed("an opinion whose text is not one line")
    return SignedOpinion(
        run_id=run_id,
        author=envelope.sender,
        document=document.document,
        text=document.text,
        withdrawn=document.withdrawn,
        sequence=envelope.sequence,
        data=bytes(content),
    )


def is_opinion(content: bytes) -> bool:
    """Return True if a stored value under a subkey is an opinion and not a record, by its envelope's kind."""
    return content[RUN_ID_BYTES + 1 : RUN_ID_BYTES + 2] == bytes([EnvelopeKind.OPINION])


def opinions_key(run_id: RunId, kind: OpinionKind) -> bytes:
    """Return the DHT key of the opinions of one kind about a run."""
    return f"swarmnet {kind}s 1\0".encode() + run_bytes(run_id)


def opinions_in_force(
    opinions: Iterable[SignedOpinion], run_id: RunId, kind: OpinionKind, now_seconds: float
) -> list[SignedOpinion]:
    """Return the newest opinion of each author on each document, the newest first. Those that have expired or
    were withdrawn are left out."""
    newest: dict[str, SignedOpinion] = {}
    for opinion in opinions:
        if opinion.run_id == run_id and opinion.kind == kind:
            known = newest.get(opinion.subkey)
            if known is None or (known.sequence, known.data) < (opinion.sequence, opinion.data):
                newest[opinion.subkey] = opinion
    in_force = [one for one in newest.values() if not one.withdrawn and one.expires_seconds > now_seconds]
    return sorted(in_force, key=lambda one: (-one.sequence, one.data))
