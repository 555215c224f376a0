"""The head of a contribution where work is audited: what its maker commits to, signed. It names what was
contributed by its digest, so that it proves by itself what was signed; a window of them fits in one body:

    body       of each head: length u16 | head
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocols.errors import Malformed
from protocols.fields import Body
from protocols.signed.envelope import ENVELOPE_BYTES, Kind, open_envelope
from protocols.signed.told_tokens import tokens_in
from swarmnet.audits.commitment import MOST_BYTES, Commitment, CommitmentError
from swarmnet.identifiers import ContributionId, PeerId, RunId

LONGEST_HEAD = ENVELOPE_BYTES + MOST_BYTES
_LENGTH_BYTES = 2


@dataclass(frozen=True, slots=True)
class Signed:
    """Verified: `sender` commits to this, and says that it stands for so many tokens."""

    sender: PeerId
    stage: int
    id: ContributionId
    tokens: int
    commitment: Commitment


def open_commitment(head: Body, run_id: RunId) -> Signed:
    """Raises as `open_envelope`, and Malformed where nobody honest can have signed it."""
    envelope = open_envelope(head, run_id, Kind.CONTRIBUTION, MOST_BYTES)
    try:
        commitment = Commitment.read(envelope.payload)
    except CommitmentError as error:
        raise Malformed(str(error)) from None
    if commitment.round != envelope.round:
        raise Malformed(f"a commitment for round {commitment.round}, signed for {envelope.round}")
    tokens = tokens_in(envelope.sequence) or 0
    return Signed(envelope.sender, envelope.stage, envelope.id, tokens, commitment)


def longest_window(rounds: int) -> int:
    """Bytes of the heads of a window of so many rounds, and of the one after it."""
    return (rounds + 1) * (_LENGTH_BYTES + LONGEST_HEAD)


def joined(heads: Iterable[bytes]) -> bytes:
    return b"".join(len(head).to_bytes(_LENGTH_BYTES, "big") + head for head in heads)


def cut(body: bytes) -> list[bytes]:
    """Raises Malformed."""
    heads: list[bytes] = []
    while body:
        length = int.from_bytes(body[:_LENGTH_BYTES], "big")
        head, body = body[_LENGTH_BYTES:][:length], body[_LENGTH_BYTES + length :]
        if len(head) < ENVELOPE_BYTES or len(head) < length:
            raise Malformed("heads of contributions that are cut short")
        heads.append(head)
    return heads
