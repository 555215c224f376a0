"""The tensor side of rounds: all runs in the compute thread, in the order in which it was decided."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from itertools import islice
from secrets import token_bytes

from peers.compute.stage_part import Computes, HasReplica
from peers.worker.rounds.contribution_source import HasGradient, contribution_source
from peers.worker.rounds.operations import (
    ContributionReady,
    DecodeContribution,
    Done,
    Operation,
    ReduceShards,
    RoundSettled,
    SlicedContribution,
)
from peers.worker.rounds.round_counts import RoundCounts
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.grants import Reduction, sign_grant
from protocols.signed.identity import Identity
from protocols.signed.pair_secrets import PairSecrets
from protocols.signed.slices import sign_slices
from protocols.signed.token_count import encode_tokens
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.optimizer.agreement.ledger import votes_of
from swarmnet.optimizer.method import Method, ReducedMethod
from swarmnet.optimizer.secure_sums.masked_votes import MaskedVotes
from swarmnet.optimizer.secure_sums.member_sets import NONCE_BYTES
from swarmnet.rounds.events import (
    ApplyRound,
    MakeContribution,
    RateRound,
    RemoveContribution,
    RestoreToMomentum,
    SettleRound,
)
from swarmnet.rounds.result_table import Contributor

HASHED_NUMBERS = 1 << 24
"""A state of at most this many numbers (64 MiB) is hashed after each round. A larger one is hashed only when
peers sign digests, because nothing is computed meanwhile."""
OWN_BYTES_KEPT = 64 << 20
"""Bytes of own contributions kept for their return after a fork; at 30 KB a round over 2,000 rounds."""


@dataclass(frozen=True, kw_only=True)
class WholeWriter:
    """Signs what this peer contributes. In this form, without reducers, that is one body."""

    identity: Identity
    run_id: RunId
    stage: int

    def write_nothing(
        self, round: int, reducers: tuple[PeerId, ...], tokens: int
    ) -> ContributionReady | SlicedContribution:
        """Return that there is no contribution, for want of a finite gradient."""
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
            self.identity,
            self.run_id,
            EnvelopeKind.CONTRIBUTION,
            self.stage,
            round,
            signed_tokens,
            payload,
        )
        assert len(data) == ENVELOPE_BYTES + len(payload)
        envelope = open_envelope(data, self.run_id, EnvelopeKind.CONTRIBUTION, len(payload))
        return ContributionReady(round, data + rest, tokens, envelope.id)


@dataclass(frozen=True, kw_only=True)
class SliceWriter(WholeWriter):
    """The form with reducers: a contribution is cut into slices with a grant for each reducer."""

    reduced: ReducedMethod

    def write_nothing(self, round: int, reducers: tuple[PeerId, ...], tokens: int) -> SlicedContribution:
        return SlicedContribution(round, reducers, tokens)

    def write(
        self, round: int, reducers: tuple[PeerId, ...], tokens: int, payload: bytes
    ) -> SlicedContribution:
        slices = self.reduced.slices(payload)
        head, identity = sign_slices(self.identity, self.run_id, self.stage, round, tokens, slices)
        cut = SlicedContribution(round, reducers, tokens, head, tuple(slices), identity)
        grants = {}
        for reducer in set(reducers):
            reduction = Reduction(self.run_id, self.stage, round, reducer)
            shards = cut.shards_of(reducer)
            grants[reducer] = sign_grant(self.identity, reduction, identity, tokens, shards)
        return replace(cut, grants=grants)

    def reduce(self, round: int, slices: Mapping[int, Mapping[Contributor, bytes]]) -> ContributionReady:
        if not slices:
            return ContributionReady(round, b"", 0, None, is_result=True)
        reduced = self.reduced
        result = reduced.reduce(slices)
        table, head = reduced.head(result)
        sealed = self._sealed(round, table.tokens(reduced.draw.shards), result[:head], result[head:])
        return replace(sealed, is_result=True, table=table, signed=ENVELOPE_BYTES + head)


@dataclass(eq=False, kw_only=True)
class UpdateWork:
    run_id: RunId
    stage: int
    identity: Identity
    stage_compute: Computes
    method: Method
    replica: HasReplica
    gathered: InitVar[HasGradient]
    settled: Callable[[RoundSettled], None]
    """Called right after a round settled, before anything else changes the weights."""
    counts: RoundCounts
    undecided: Container[ContributionId]
    """The own contributions that have neither settled nor been given up."""
    signs_every: int = 1
    """Rounds between signed digests (`rounds.snapshot_interval`)."""
    own: OrderedDict[ContributionId, bytes] = field(default_factory=OrderedDict, init=False)
    """Payloads of own contributions: all undecided ones, and the newest up to OWN_BYTES_KEPT."""
    tokens: int | None = field(default=None, init=False)
    """Tokens in all rounds settled in the replica; None if not known."""
    closed: bool = field(default=False, init=False)
    """Set when the state is fetched again: queued operations belong to an abandoned branch."""
    _contributed: int = field(default=-1, init=False)
    """The newest round to which this peer has contributed; -1 if none."""

    def __post_init__(self, gathered: HasGradient) -> None:
        self.source = contribution_source(self.method)(
            method=self.method,
            stage_compute=self.stage_compute,
            gathered=gathered,
            replica=self.replica,
            counts=self.counts,
            me=self.identity.peer_id,
        )
        if isinstance(self.method, MaskedVotes):
            self.method.keystream = PairSecrets(self.identity, self.run_id).keystream
            self.method.nonce = token_bytes(NONCE_BYTES)
        reduced = self.method.reduced
        writer = WholeWriter if reduced is None else partial(SliceWriter, reduced=reduced)
        self.writer = writer(identity=self.identity, run_id=self.run_id, stage=self.stage)

    def run(self, operations: Sequence[Operation]) -> list[Done]:
        """Run operations in order and publish the weights if they changed; returns their results."""
        results: list[Done] = []
        stale = False
        corrections_before = self.replica.corrections
        for operation in operations:
            match operation:
                case MakeContribution(round, _, reducers):
                    results.append(self._make(round, reducers))
                    self._contributed = round
                    stale |= self.source.switch_experts(round) or self._ahead
                    results += self.source.reassignment(round)
                case ReduceShards(round, slices):
                    results.append(self.writer.reduce(round, slices))
                case DecodeContribution(round, peer, payload):
                    self.replica.add(round, peer, payload)
                    self.counts.corrections += round <= self.replica.applied_round
                case RemoveContribution(round, peer):
                    self.replica.remove(round, peer)
                case RateRound(round, factor):
                    self.replica.rate(round, factor)
                case ApplyRound(round, _, _):
                    self.replica.apply(round)
                    self.counts.voted(self.replica.vote_agreement(round, self.identity.peer_id))
                    stale = True
                case SettleRound(round, references, chain, tokens, contributors):
                    digest = self.replica.settle(round, self._hashes(round), chain)
                    votes = votes_of(self.method)
                    result = RoundSettled(round, digest, chain, references, tokens, contributors, votes)
                    self.tokens = tokens
                    if not self.closed:
                        self.settled(result)
                    results.append(result)
                case RestoreToMomentum(round, identity, shards):
                    self.give_back(round, identity, shards)
        if stale or self.replica.corrections > corrections_before:
            self.publish()
        return results

    @property
    def _ahead(self) -> bool:
        """Whether the published weights include this peer's own momentum or votes as a lookahead: while a
        round is not applied to which it has contributed."""
        return self.source.has_lookahead and self._contributed > self.replica.applied_round

    def _hashes(self, round: int) -> bool:
        return self.replica.size <= HASHED_NUMBERS or (round + 1) % self.signs_every == 0

    def step_if_due(self) -> None:
        """Make a local optimizer step if enough tokens were gathered, and publish the weights. Called after
        each gradient."""
        if not self.closed and self.source.step_if_due():
            self._publish()

    def publish(self) -> None:
        """Publish the live weights for the next microbatches."""
        self.source.published(self.replica.applied_round)
        self._publish()

    def _publish(self) -> None:
        self.stage_compute.publish(self.replica.live_tiles(self._ahead))

    def give_back(self, round: int, identity: ContributionId, shards: tuple[int, ...] = ()) -> None:
        """Restore an own contribution, or some of its shards, to the momentum if its payload is kept."""
        payload = self.own.get(identity) if shards else self.own.pop(identity, None)
        if payload is not None:
            self.method.give_back(payload, round, self.identity.peer_id, shards)

    def _forget_oldest(self, size: int, newest: ContributionId) -> None:
        """Drop the oldest decided payloads beyond the limit; an undecided one may have to be restored."""
        surplus = len(self.own) - OWN_BYTES_KEPT // max(1, size)
        decided = (name for name in self.own if name != newest and name not in self.undecided)
        for name in list(islice(decided, max(0, surplus))):
            del self.own[name]

    def _make(self, round: int, reducers: tuple[PeerId, ...]) -> ContributionReady | SlicedContribution:
        """Make this peer's contribution to a round, whole or in slices for reducers."""
        payload, tokens = self.source.encode(round)
        if payload is None:
            self.counts.not_finite += tokens > 0  # Without tokens, there was nothing to contribute.
            return self.writer.write_nothing(round, reducers, tokens)
        self.counts.norms = self.method.gradient_norm, self.method.momentum_norm
        made = self.writer.write(round, reducers, tokens, payload)
        assert made.id is not None
        self.own[made.id] = payload
        self._forget_oldest(len(payload), made.id)
        return made
