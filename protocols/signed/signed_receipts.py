"""Signed receipts, by which a peer confirms the contributions of another peer in a block of rounds.

This module encodes the payload of their envelope (docs/wire.md) and refuses invalid receipts."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from protocols.errors import Malformed
from protocols.fields import Body, Count, Name, NumberOrNone, RoundNumber
from protocols.signed import msgpack_guard
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId, RunId
from swarmnet.rounds.receipt_rules import Receipt, ReceiptError, check

RECEIPT_LIMIT = 128
"""Maximum size in bytes of a receipt's payload: 52 for a peer id and at most 36 for four numbers."""
SEALED_BYTES = ENVELOPE_BYTES + RECEIPT_LIMIT
"""Maximum size in bytes of a receipt in its envelope."""


class ReceiptBody(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="receipt"):
    """The signed payload of a receipt. Its stage and last round are in the envelope."""

    contributor: Name
    first: RoundNumber
    contributions: Count
    tokens: NumberOrNone = -1
    """Tokens of these contributions; -1 if not known."""


_decoder = msgspec.msgpack.Decoder(ReceiptBody)


def seal_receipt(identity: Identity, run_id: RunId, receipt: Receipt, now: float) -> bytes:
    """Sign a receipt and return the envelope. `now` is the swarm's time in seconds."""
    body = ReceiptBody(receipt.contributor, receipt.first, receipt.contributions, receipt.tokens)
    payload, sequence = msgspec.msgpack.encode(body), int(now * 1000)  # Milliseconds.
    return seal(identity, run_id, EnvelopeKind.RECEIPT, receipt.stage, receipt.last, sequence, payload)


def open_receipt(data: Body, run_id: RunId, block_rounds: int) -> tuple[Receipt, float]:
    """Verify a receipt. Returns the receipt and the time of signing in seconds. `block_rounds` is the number
    of rounds in a block. Raises WireError if the envelope or the receipt is invalid."""
    envelope = open_envelope(data, run_id, EnvelopeKind.RECEIPT, RECEIPT_LIMIT)
    payload = bytes(envelope.payload)
    msgpack_guard.check(payload, RECEIPT_LIMIT)
    try:
        body = _decoder.decode(payload)
        receipt = Receipt(
            signer=envelope.sender,
            contributor=PeerId(body.contributor),
            stage=envelope.stage,
            first=body.first,
            last=envelope.round,
            contributions=body.contributions,
            tokens=body.tokens,
        )
        check(receipt, block_rounds)
    except (msgspec.DecodeError, UnicodeDecodeError, ReceiptError) as error:
        raise Malformed(f"no receipt: {error}") from None
    return receipt, envelope.sequence / 1000  # From milliseconds.
