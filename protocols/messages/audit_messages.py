"""Messages that audit reducers: the slices behind a result, and proofs that a result is false."""

from __future__ import annotations

from typing import ClassVar

from protocols.fields import BodyLimit, Identifier, Message, Name, Number, RoundNumber, RunSizes
from protocols.messages.round_messages import contribution_bytes, slices_bytes


def longest_evidence(run: RunSizes) -> int:
    """Return the largest body of evidence in bytes: a result, or slices; 0 without reducers."""
    return max(contribution_bytes(run), slices_bytes(run)) if run.slices_bytes else 0


class GetSlices(Message, frozen=True, tag=80):
    """Request the slices of one shard that went into a result. The reducer that made the result, or a peer
    that sent `FraudProof` about it, replies with one `Evidence` per slice."""

    kind: ClassVar[str] = "audit"
    result: Identifier
    shard: Number


class Evidence(Message, frozen=True, tag=81):
    """Body: one slice with its signed head (protocols/signed/slices.py). A peer that sent `FraudProof` about
    the result sends the signed result first."""

    kind: ClassVar[str] = "audit"
    priority: ClassVar[int] = 1
    body: ClassVar[BodyLimit] = longest_evidence
    result: Identifier
    shard: Number


class FraudProof(Message, frozen=True, tag=82):
    """The sender has proof that `peer` published a false result for `round`: its `shard` does not match the
    slices. It is repeated once a second until the receiver also sends `FraudProof` for this result."""

    kind: ClassVar[str] = "audit"
    peer: Name
    round: RoundNumber
    result: Identifier
    shard: Number
