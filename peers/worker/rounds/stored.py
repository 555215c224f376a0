"""Contributions as they came, checked, and as they are kept for those who want them."""

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
    """The envelope with the payload, as it travels; of a settled round maybe on the disk."""
    tokens: int
    """That it says it stands for."""

    @property
    def payload(self) -> bytes:
        return bytes(self.data[ENVELOPE_BYTES:])


@dataclass(frozen=True, slots=True)
class Opened:
    """A contribution, or a result, whose signature is verified."""

    reference: Reference
    tokens: int
    table: Table | None = None
    signed: int = 0
    """Of a result: bytes at its beginning that name the rest."""


def opened_contribution(data: bytes, work: UpdateWork) -> Opened:
    """To the stage of this work. Raises WireError."""
    method, signed, table = work.method, len(data), None
    if method.reduced is not None:  # Of a result the head, which names the rest by its digest.
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
