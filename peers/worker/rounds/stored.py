"""Contributions as they arrive, verified, and as they are stored for peers that request them."""

from __future__ import annotations

from dataclasses import dataclass

from peers.worker.rounds.update_compute import UpdateWork
from protocols.errors import Malformed
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope
from protocols.signed.token_count import tokens_in
from swarmnet.optimizer.method import ContributionError
from swarmnet.rounds.events import Reference
from swarmnet.rounds.result_table import Table


@dataclass(frozen=True, slots=True)
class Stored:
    reference: Reference
    data: bytes | memoryview
    """The envelope with the payload, as sent; on disk if it is long and its round has settled."""
    tokens: int
    """Tokens that the contributor claims for it."""

    @property
    def payload(self) -> bytes:
        return bytes(self.data[ENVELOPE_BYTES:])


@dataclass(frozen=True, slots=True)
class Opened:
    """A contribution or a result whose signature has been verified."""

    reference: Reference
    tokens: int
    table: Table | None = None
    signed: int = 0
    """Length in bytes of a result's signed head, which names the rest by its digest."""


def opened_contribution(data: bytes, work: UpdateWork) -> Opened:
    """Verify a contribution to this stage. Raises WireError."""
    method, signed, table = work.method, len(data), None
    if method.reduced is not None:  # Only a result's head is signed; it names the rest by its digest.
        try:
            table, length = method.reduced.head(data[ENVELOPE_BYTES:])
        except ContributionError as error:
            raise Malformed(str(error)) from None
        signed = ENVELOPE_BYTES + length
    longest = max(method.payload_bytes, signed)
    envelope = open_envelope(data[:signed], work.run_id, EnvelopeKind.CONTRIBUTION, longest)
    if envelope.stage != work.stage:
        raise Malformed(f"a contribution to stage {envelope.stage}, this group holds {work.stage}")
    reference = Reference(envelope.round, envelope.sender, envelope.id, len(data))
    return Opened(reference, tokens_in(envelope.sequence) or 0, table, signed)
