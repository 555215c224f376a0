"""Contributions as they came, checked, and as they are kept for those who want them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peers.worker.rounds.replays import PastRound
from peers.worker.rounds.update_compute import UpdateWork
from protocols.errors import Malformed
from protocols.signed.commitments import open_commitment
from protocols.signed.envelope import ENVELOPE_BYTES, Kind, open_envelope
from protocols.signed.told_tokens import tokens_in
from swarmnet.audits.commitment import Commitment
from swarmnet.identifiers import ContributionId
from swarmnet.optimizer.method import ContributionError
from swarmnet.rounds.contribution_sets import RoundSet
from swarmnet.rounds.events import Reference
from swarmnet.rounds.result_table import Table


@dataclass(frozen=True, slots=True)
class Stored:
    reference: Reference
    data: bytes | memoryview
    """The envelope with the payload, as it travels; of a settled round maybe on the disk."""
    tokens: int
    """That it says it stands for."""
    commitment: Commitment | None = None
    """At its head, where work is audited."""

    @property
    def head_bytes(self) -> int:
        return ENVELOPE_BYTES + (len(self.commitment.written()) if self.commitment is not None else 0)

    @property
    def payload(self) -> bytes:
        return bytes(self.data[self.head_bytes :])


@dataclass(frozen=True, slots=True)
class Opened:
    """A contribution, or a result, whose signature is verified."""

    reference: Reference
    tokens: int
    table: Table | None = None
    signed: int = 0
    """Of a result: bytes at its beginning that name the rest."""
    commitment: Commitment | None = None
    """At its head, where work is audited."""


def opened_contribution(data: bytes, work: UpdateWork) -> Opened:
    """To the stage of this work. Raises WireError."""
    if work.commits:
        return _committed(data, work)
    method, signed, table = work.method, len(data), None
    if method.reduced is not None:  # Of a result the head, which names the rest by its digest.
        try:
            table, length = method.reduced.head(data[ENVELOPE_BYTES:])
        except ContributionError as error:
            raise Malformed(str(error)) from None
        signed = ENVELOPE_BYTES + length
    longest = max(method.payload_bytes, signed)
    envelope = open_envelope(data[:signed], work.run_id, Kind.CONTRIBUTION, longest)
    _require_stage(envelope.stage, work)
    reference = Reference(envelope.round, envelope.sender, envelope.id, len(data))
    return Opened(reference, tokens_in(envelope.sequence) or 0, table, signed)


def past_rounds(
    history: Mapping[int, RoundSet], stored: Mapping[ContributionId, Stored],
    chain_at: Callable[[int], bytes | None],
) -> dict[int, PastRound]:  # fmt: skip
    """Settled rounds, as far back as their contributions are kept."""
    found = {}
    for number, state in history.items():
        chain = chain_at(number)
        if chain is not None and all(each.id in stored for each in state.held.values()):
            held = {peer: _past(stored[each.id]) for peer, each in state.held.items()}
            found[number] = PastRound(held, state.factor, chain)
    return found


def _committed(data: bytes, work: UpdateWork) -> Opened:
    """Where work is audited: the head is signed, and names the rest by its digest. Raises WireError."""
    head = len(data) - work.method.payload_bytes
    signed = open_commitment(data[: max(0, head)], work.run_id)
    _require_stage(signed.stage, work)
    if hashlib.sha256(data[head:]).digest() != signed.commitment.payload:
        raise Malformed("a contribution that is not the one that its head names")
    reference = Reference(signed.commitment.round, signed.sender, signed.id, len(data))
    return Opened(reference, signed.tokens, commitment=signed.commitment)


def _require_stage(stage: int, work: UpdateWork) -> None:
    if stage != work.stage:
        raise Malformed(f"a contribution to stage {stage}, this group holds {work.stage}")


def _past(stored: Stored) -> tuple[Commitment, memoryview]:
    assert stored.commitment is not None, "where work is audited, each contribution has one"
    return stored.commitment, memoryview(stored.data)[stored.head_bytes :]
