"""Signed envelopes around every record, contribution, snapshot root and order; verified from the sender's
peer id.

The signed statement names the run and the hash of the payload, so an envelope cannot be replayed into another
run. Data that the receiver knows or computes is not sent: the run id and the payload's length and hash. Only
the first 8 bytes of the run id are sent, which distinguishes another run's envelope from a forgery.
docs/wire.md has the layout:

    wire       format u8 | kind u8 | run prefix 8 B | public key 32 B | stage i16 | round u32 | sequence u64
               | signature 64 B | payload                                            (120 bytes + payload)
    statement  domain | run id 32 B | public key 32 B | kind u8 | stage i16 | round u32 | sequence u64
               | payload length u64 | SHA-256 of the payload

All integers are big-endian. Lengths are checked first, then the signature. Only then is anything decoded.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

from protocols.errors import BadSignature, Malformed, TooLarge, WrongRun
from protocols.fields import Body
from protocols.signed.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from swarmnet.identifiers import ContributionId, PeerId, RunId

FORMAT = 1
_DOMAIN = b"swarmnet envelope 1\0"
_HEAD = struct.Struct(f">BB8s{PUBLIC_KEY_BYTES}shIQ{SIGNATURE_BYTES}s")
_STATEMENT = struct.Struct(f">{len(_DOMAIN)}s32s{PUBLIC_KEY_BYTES}sBhIQQ32s")
ENVELOPE_BYTES = _HEAD.size
"""Bytes that an envelope adds to its payload: 120."""
ID_BYTES = 16
RUN_ID_BYTES = 32


class EnvelopeKind(IntEnum):
    """The purpose of an envelope. A signature for one kind is not valid for another."""

    RECORD = 1
    CONTRIBUTION = 2
    SNAPSHOT = 3
    SETTLED = 4
    ORDER = 5
    MANIFEST = 6
    INVITE = 7
    RECEIPT = 8
    SLICES = 9
    MODERATION = 10
    OPINION = 11


@dataclass(frozen=True, slots=True)
class Envelope:
    """A verified envelope."""

    sender: PeerId
    kind: EnvelopeKind
    stage: int
    """The stage; -1 if there is none."""
    round: int
    sequence: int
    payload: memoryview
    id: ContributionId
    """First 16 bytes of SHA-256 over the whole statement, which includes the sender and the payload hash."""


def run_bytes(run_id: RunId) -> bytes:
    """Return the 32 bytes of a run id. Raises ValueError if the text is not a run id."""
    raw = bytes.fromhex(run_id)
    if len(raw) != RUN_ID_BYTES or run_id != raw.hex():
        raise ValueError(f"{run_id[:80]!r} is not a run id (64 lower-case hexadecimal digits)")
    return raw


def _statement(
    run: bytes, key: bytes, kind: int, stage: int, round: int, sequence: int, payload: Body
) -> bytes:
    """Return the bytes that the signature covers; they contain the hash of the payload, not the payload."""
    digest = hashlib.sha256(payload).digest()
    return _STATEMENT.pack(_DOMAIN, run, key, kind, stage, round, sequence, len(payload), digest)


def seal(
    identity: Identity,
    run_id: RunId,
    kind: EnvelopeKind,
    stage: int,
    round: int,
    sequence: int,
    payload: Body,
) -> bytes:
    """Sign `payload` and return the envelope with it. `stage` is -1 if there is none. The items of a
    memoryview must be single bytes, because its length is signed. Raises ValueError for an invalid run id."""
    run = run_bytes(run_id)
    key = identity.public_key
    signature = identity.sign(_statement(run, key, kind, stage, round, sequence, payload))
    head = _HEAD.pack(FORMAT, kind, run[:8], key, stage, round, sequence, signature)
    return b"".join((head, payload))


def claimed(data: Body) -> tuple[PeerId, int, int]:
    """Return sender, stage and round as the envelope claims them, without verifying the signature. Raises
    Malformed if `data` is too short for an envelope."""
    if len(data) < ENVELOPE_BYTES:
        raise Malformed(f"an envelope of {len(data)} bytes; it has at least {ENVELOPE_BYTES}")
    _format, _kind, _prefix, key, stage, round, _sequence, _signature = _HEAD.unpack_from(data)
    return peer_id_of(key), stage, round


def open_envelope(data: Body, run_id: RunId, kind: EnvelopeKind, payload_limit: int) -> Envelope:
    """Verify an envelope of this run and kind, whose payload has at most `payload_limit` bytes, and return
    it. Its payload is a view into `data`, which must not change afterwards. Raises Malformed, TooLarge,
    WrongRun or BadSignature."""
    length = len(data) - ENVELOPE_BYTES
    if length < 0:
        raise Malformed(f"an envelope of {len(data)} bytes; it has at least {ENVELOPE_BYTES}")
    if length > payload_limit:
        raise TooLarge(f"a {kind.name.lower()} of {length} bytes; at most {payload_limit} are allowed")
    format, signed_kind, prefix, key, stage, round, sequence, signature = _HEAD.unpack_from(data)
    if format != FORMAT:
        raise Malformed(f"envelope format {format}; this program reads {FORMAT}")
    if signed_kind != kind:
        raise Malformed(
            f"an envelope of kind {signed_kind} where a {kind.name.lower()} ({int(kind)}) belongs"
        )
    run = run_bytes(run_id)
    if prefix != run[:8]:
        raise WrongRun(f"signed for the run {prefix.hex()}..., this is {run_id[:16]}...")
    payload = memoryview(data).toreadonly()[ENVELOPE_BYTES:]
    statement = _statement(run, key, signed_kind, stage, round, sequence, payload)
    sender = peer_id_of(key)
    if not verify(sender, statement, signature):
        raise BadSignature(f"the {kind.name.lower()} that claims to be from {sender} is not signed by it")
    identifier = ContributionId(hashlib.sha256(statement).digest()[:ID_BYTES])
    return Envelope(sender, kind, stage, round, sequence, payload, identifier)
