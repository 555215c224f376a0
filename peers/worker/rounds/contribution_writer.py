"""Sign what a peer contributes. Everything here runs in the compute thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from peers.worker.rounds.operations import ContributionReady, SlicedContribution
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.grants import Reduction, sign_grant
from protocols.signed.identity import Identity
from protocols.signed.slices import sign_slices
from protocols.signed.token_count import encode_tokens
from swarmnet.identifiers import PeerId, RunId
from swarmnet.optimizer.method import Method, ReducedMethod
from swarmnet.rounds.result_table import Contributor


class WholeWriter:
    """The form without reducers: a contribution is one signed body."""

    def __init__(self, identity: Identity, run_id: RunId, stage: int) -> None:
        self._identity = identity
        self._run_id = run_id
        self._stage = stage

    def write_nothing(
        self, round: int, reducers: tuple[PeerId, ...], tokens: int
    ) -> ContributionReady | SlicedContribution:
        """Return that there is no contribution, because the gradient was not finite."""
        return ContributionReady(round, b"", tokens, None)

    def write(
        self, round: int, reducers: tuple[PeerId, ...], tokens: int, payload: bytes
    ) -> ContributionReady | SlicedContribution:
        """Sign a contribution; `reducers` are those of each shard, by shard."""
        return self._sealed(round, tokens, payload)

    def reduce(self, round: int, slices: Mapping[int, Mapping[Contributor, bytes]]) -> ContributionReady:
        """Reduce the slices of a round, by shard and contributor, and return the signed result."""
        raise AssertionError("in a run without reducers no peer reduces slices")

    def _sealed(self, round: int, tokens: int, payload: bytes, rest: bytes = b"") -> ContributionReady:
        """Sign a contribution. `rest` follows the payload, which names it by its digest."""
        signed_tokens = encode_tokens(tokens, round)
        data = seal(
            self._identity,
            self._run_id,
            EnvelopeKind.CONTRIBUTION,
            self._stage,
            round,
            signed_tokens,
            payload,
        )
        assert len(data) == ENVELOPE_BYTES + len(payload)
        envelope = open_envelope(data, self._run_id, EnvelopeKind.CONTRIBUTION, len(payload))
        return ContributionReady(round, data + rest, tokens, envelope.id)


class SliceWriter(WholeWriter):
    """The form with reducers: a contribution is cut into slices with a grant for each reducer."""

    def __init__(self, identity: Identity, run_id: RunId, stage: int, reduced: ReducedMethod) -> None:
        super().__init__(identity, run_id, stage)
        self._reduced = reduced

    def write_nothing(self, round: int, reducers: tuple[PeerId, ...], tokens: int) -> SlicedContribution:
        return SlicedContribution(round, reducers, tokens)

    def write(
        self, round: int, reducers: tuple[PeerId, ...], tokens: int, payload: bytes
    ) -> SlicedContribution:
        slices = self._reduced.slices(payload)
        head, identity = sign_slices(self._identity, self._run_id, self._stage, round, tokens, slices)
        cut = SlicedContribution(round, reducers, tokens, head, tuple(slices), identity)
        grants = {}
        for reducer in set(reducers):
            reduction = Reduction(self._run_id, self._stage, round, reducer)
            shards = cut.shards_of(reducer)
            grants[reducer] = sign_grant(self._identity, reduction, identity, tokens, shards)
        return replace(cut, grants=grants)

    def reduce(self, round: int, slices: Mapping[int, Mapping[Contributor, bytes]]) -> ContributionReady:
        if not slices:
            return ContributionReady(round, b"", 0, None, is_result=True)
        reduced = self._reduced
        result = reduced.reduce(slices)
        table, head = reduced.head(result)
        sealed = self._sealed(round, table.tokens(reduced.draw.shards), result[:head], result[head:])
        return replace(sealed, is_result=True, table=table, signed=ENVELOPE_BYTES + head)


def contribution_writer(method: Method, identity: Identity, run_id: RunId, stage: int) -> WholeWriter:
    """Return the form that the method needs."""
    if method.reduced is None:
        return WholeWriter(identity, run_id, stage)
    return SliceWriter(identity, run_id, stage, method.reduced)
