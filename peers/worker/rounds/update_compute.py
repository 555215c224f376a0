"""The tensor side of rounds: everything here runs in the compute thread, in the order in which it was
decided.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from peers.compute.stage_part import Computes, HasReplica
from peers.worker.rounds.round_counts import RoundCounts
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.grants import Reduction, sign_grant
from protocols.signed.identity import Identity
from protocols.signed.slices import sign_slices
from protocols.signed.token_count import encode_tokens
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.method import GradientError, LocalOptimizer, Method, should_flush_partial_step
from swarmnet.rounds.events import (
    ApplyRound,
    MakeContribution,
    RateRound,
    Reference,
    RemoveContribution,
    RestoreToMomentum,
    SettleRound,
)
from swarmnet.rounds.result_table import Contributor, Table
from swarmnet.run.rates import WHOLE

HASHED_NUMBERS = 1 << 24
"""A state of at most this many numbers (64 MiB) is hashed after each round. A larger one is hashed only when
peers sign digests, because nothing is computed meanwhile."""
OWN_BYTES_KEPT = 64 << 20
"""Bytes of own contributions kept for their return after a fork; at 30 KB a round, over two thousand
rounds."""


class HasGradient(Protocol):
    """The owner of the gradient that a contribution takes (the pipeline service)."""

    gathered_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeContribution:
    round: int
    peer: PeerId
    payload: bytes


@dataclass(frozen=True, slots=True)
class ContributionReady:
    """A contribution; it has no data if the gradient was not finite."""

    round: int
    data: bytes
    tokens: int
    id: ContributionId | None
    is_result: bool = False
    """Whether this is the result of contributions that this peer has reduced."""
    table: Table | None = None
    """The table of contributors, for a result."""
    signed: int = 0
    """For a result: length in bytes of its signed head, which names the rest. 0 means that all of it is
    signed."""


@dataclass(frozen=True, slots=True)
class SlicedContribution:
    """A contribution for reducers; it has no id if the gradient was not finite."""

    round: int
    reducers: tuple[PeerId, ...]
    """The reducer of each shard, by shard."""
    tokens: int
    head: bytes = b""
    """The signed head that is sent before the slices (protocols/signed/slices.py)."""
    slices: tuple[bytes, ...] = ()
    id: ContributionId | None = None
    grants: Mapping[PeerId, bytes] = field(default_factory=dict)
    """For each reducer, the signature that allows it to reduce these slices (protocols/signed/grants.py)."""

    def shards_of(self, reducer: PeerId) -> list[int]:
        """Return the shards whose slices go to this reducer, in order."""
        return [shard for shard, drawn in enumerate(self.reducers) if drawn == reducer]


@dataclass(frozen=True, slots=True)
class ReduceShards:
    """The slices of a round, by shard and contributor, that this peer reduces."""

    round: int
    slices: Mapping[int, Mapping[Contributor, bytes]]


@dataclass(frozen=True, slots=True)
class RoundSettled:
    round: int
    digest: bytes
    """`Replica.digest()` after the round, or NOT_HASHED."""
    chain: bytes
    references: tuple[Reference, ...]
    tokens: int | None = None
    """Tokens in all settled rounds up to this one; None if not known."""
    contributors: tuple[PeerId, ...] = ()
    """The contributors to the round, as far as they are known."""


@dataclass(frozen=True, slots=True)
class ExpertChange:
    """Reported when this peer trains other experts, or when a group of experts has lost or gained its
    peers."""

    round: int
    experts: range
    group: int
    holders: tuple[int, ...]
    """Number of peers that train each group."""


Operation = (
    MakeContribution
    | ReduceShards
    | DecodeContribution
    | RemoveContribution
    | RateRound
    | ApplyRound
    | SettleRound
    | RestoreToMomentum
)
Done = ContributionReady | SlicedContribution | RoundSettled | ExpertChange


def experts_line(took_up: ExpertChange) -> str:
    """Return a line for people about the experts that this peer trains."""
    first, last = took_up.experts[0], took_up.experts[-1]
    which = f"expert {first}" if first == last else f"experts {first} to {last}"
    counts = ", ".join(map(str, took_up.holders))
    line = f"trains {which} of each layer; peers of each group of experts: {counts}"
    others = ((group, count) for group, count in enumerate(took_up.holders) if group != took_up.group)
    alone = [str(group) for group, count in others if not count]
    if not alone:
        return line
    return f"{line}; no peer trains group {' and '.join(alone)}: it stays as it is until one does"


class UpdateWork:
    def __init__(
        self,
        *,
        run_id: RunId,
        stage: int,
        identity: Identity,
        stage_compute: Computes,
        method: Method,
        replica: HasReplica,
        gathered: HasGradient,
        settled: Callable[[RoundSettled], None],
        counts: RoundCounts,
        undecided: Container[ContributionId],
        signs_every: int = 1,
    ) -> None:
        """`settled` is called right after a round settled, before anything else changes the weights.

        `undecided` contains the own contributions that have neither settled nor been given up. `signs_every`
        is the number of rounds between signed digests (`rounds.snapshot_interval`)."""
        self.run_id = run_id
        self.stage = stage
        self.identity = identity
        self.stage_compute = stage_compute
        self.method = method
        self.replica = replica
        self.gathered = gathered
        self.settled = settled
        self.counts = counts
        self.undecided = undecided
        self.own: OrderedDict[ContributionId, bytes] = OrderedDict()
        """Payloads of own contributions: all undecided ones, and the newest up to OWN_BYTES_KEPT."""
        self.tokens: int | None = None
        """Tokens in all rounds settled in the replica; None if not known."""
        self.closed = False
        """Set when the state is fetched again: queued operations belong to an abandoned branch."""
        self.optimizer_warmup_steps = 0
        """Local optimizer steps left that only fill the moment estimates. While there are any, committed
        tokens are not counted. Set by a newcomer before it serves, then counted down in the compute
        thread."""
        self.joins = 0
        """Warm-up steps to repeat if this peer switches to the experts with the fewest peers, as soon as it
        knows them. Set by a newcomer before it serves; 0 keeps its experts."""
        self._reported_experts: tuple[int, tuple[int, ...]] | None = None
        """The group of experts last reported, and the groups without a peer then."""
        held = method.held
        if held is not None and held.begins(identity.peer_id):
            stage_compute.train(held.trained)
        self._ahead = False
        """Whether the published weights include this peer's own momentum as a lookahead."""
        self._stepped_tokens = 0
        """Tokens in local steps since the last contribution."""
        self._published_round = -1
        """The newest applied round in the published weights."""
        self._signs_every = signs_every
        self._rate: tuple[int, int] | None = None
        """The round after the published one and its learning-rate factor, as of the newest microbatch."""

    def run(self, operations: Sequence[Operation]) -> list[Done]:
        """Run operations in order and publish the weights if they changed; returns their results."""
        results: list[Done] = []
        stale = False
        for operation in operations:
            match operation:
                case MakeContribution(round, _, reducers):
                    results.append(self._make(round, reducers))
                    self._ahead = self.method.own is None
                    stale |= self._switch_experts(round) or self._ahead
                    results += self._reassignment(round)
                case ReduceShards(round, slices):
                    results.append(self._reduce(round, slices))
                case DecodeContribution(round, peer, payload):
                    self.replica.add(round, peer, payload)
                    self.counts.corrections += round <= self.replica.applied_round
                    stale |= round <= self.replica.applied_round
                case RemoveContribution(round, peer):
                    self.replica.remove(round, peer)
                    stale |= round <= self.replica.applied_round
                case RateRound(round, factor):
                    self.replica.rate(round, factor)
                    stale |= round <= self.replica.applied_round
                case ApplyRound(round, _, _):
                    self.replica.apply(round)
                    self.counts.voted(self.replica.vote_agreement(round, self.identity.peer_id))
                    self._ahead = False
                    stale = True
                case SettleRound(round, references, chain, tokens, contributors):
                    digest = self.replica.settle(round, self._hashes(round))
                    result = RoundSettled(round, digest, chain, references, tokens, contributors)
                    self.tokens = tokens
                    if not self.closed:
                        self.settled(result)
                    results.append(result)
                case RestoreToMomentum(round, identity, shards):
                    self.give_back(round, identity, shards)
        if stale:
            self.publish()
        return results

    def _hashes(self, round: int) -> bool:
        return self.replica.size <= HASHED_NUMBERS or (round + 1) % self._signs_every == 0

    def step_if_due(self) -> None:
        """Make a local optimizer step if enough tokens were gathered, and publish the weights. Called after
        each gradient."""
        own = self.method.own
        if own is None or self.closed:
            return
        if self._join_fewest():
            return
        round = self._published_round + 1
        self._rate = round, 0 if self.optimizer_warmup_steps else self.replica.factor(round)
        if self.gathered.gathered_tokens < own.tokens:
            return
        self._step(own)
        self._publish()

    def begin_as_newcomer(self, warmup_steps: int) -> None:
        """Fill the moment estimates of local optimizer steps first; called before this peer serves."""
        if self.method.own is not None:
            self.optimizer_warmup_steps = warmup_steps
            self.joins = warmup_steps

    def publish(self) -> None:
        """Publish the live weights for the next microbatches."""
        self._published_round = self.replica.applied_round
        self._publish()

    def _publish(self) -> None:
        self.stage_compute.publish(self.replica.live_tiles(self._ahead))

    def _step(self, own: LocalOptimizer) -> None:
        tokens = self.gathered.gathered_tokens
        self.gathered.gathered_tokens = 0
        round, factor = self._rate or (self._published_round + 1, WHOLE)
        try:
            self.stage_compute.use_gradient(
                lambda gradient: own.step(gradient, max(1, tokens), round, factor)
            )
        except GradientError:
            self.counts.not_finite += 1
            return
        if self.optimizer_warmup_steps:
            self.optimizer_warmup_steps -= 1
        else:
            self._stepped_tokens += tokens

    def _join_fewest(self) -> bool:
        """Switch to the experts that the fewest peers train, while this peer is new; returns whether it
        switched."""
        held, joins = self.method.held, self.joins
        if not (joins and self.optimizer_warmup_steps and held is not None and held.knows_holders):
            return False
        self.joins = 0
        if not held.joins():
            return False
        self.optimizer_warmup_steps = joins
        self._train_assigned(held)
        return True

    def _switch_experts(self, round: int) -> bool:
        """Switch to other experts if it is this peer's turn; returns whether it switched."""
        held = self.method.held
        if held is None or not held.goes_over(round, self.identity.peer_id):
            return False
        self._train_assigned(held)
        return True

    def _train_assigned(self, held: ExpertShardSteps) -> None:
        """Train the assigned experts from now on, and discard gradients gathered for the ones before."""
        self.gathered.gathered_tokens = 0
        self.stage_compute.train(held.trained)

    def _reassignment(self, round: int) -> list[ExpertChange]:
        """Return the new assignment of experts if it has changed."""
        held = self.method.held
        if held is None:
            return []
        holders = held.holders()
        assignment = held.group, tuple(group for group, count in enumerate(holders) if not count)
        if assignment == self._reported_experts or not any(holders):
            return []
        self._reported_experts = assignment
        return [ExpertChange(round, held.experts, held.group, tuple(holders))]

    def give_back(self, round: int, identity: ContributionId, shards: tuple[int, ...] = ()) -> None:
        """Restore an own contribution, or some of its shards, to the momentum, if its payload is still
        kept."""
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
        own = self.method.own
        if own is None:
            payload, tokens = self._encode_gradient(round)
        else:
            payload, tokens = self._encode_local_delta(round, own)
        if payload is None:
            self.counts.not_finite += 1
            return (
                SlicedContribution(round, reducers, tokens)
                if reducers
                else ContributionReady(round, b"", tokens, None)
            )
        self.counts.norms = self.method.gradient_norm, self.method.momentum_norm
        made: ContributionReady | SlicedContribution
        if reducers:
            made = self._cut(round, reducers, tokens, payload)
        else:
            made = self._sealed(round, tokens, payload)
        assert made.id is not None
        self.own[made.id] = payload
        self._forget_oldest(len(payload), made.id)
        return made

    def _sealed(self, round: int, tokens: int, payload: bytes, rest: bytes = b"") -> ContributionReady:
        """Sign a contribution. `rest` follows the payload, which names it by its digest."""
        signed_tokens = encode_tokens(tokens, round)
        data = seal(
            self.identity, self.run_id, EnvelopeKind.CONTRIBUTION, self.stage, round, signed_tokens, payload
        )
        assert len(data) == ENVELOPE_BYTES + len(payload)
        envelope = open_envelope(data, self.run_id, EnvelopeKind.CONTRIBUTION, len(payload))
        return ContributionReady(round, data + rest, tokens, envelope.id)

    def _cut(
        self, round: int, reducers: tuple[PeerId, ...], tokens: int, payload: bytes
    ) -> SlicedContribution:
        """Split a contribution into signed slices with a grant for each reducer."""
        assert self.method.reduced is not None
        slices = self.method.reduced.slices(payload)
        head, identity = sign_slices(self.identity, self.run_id, self.stage, round, tokens, slices)
        cut = SlicedContribution(round, reducers, tokens, head, tuple(slices), identity)
        grants = {}
        for reducer in set(reducers):
            reduction = Reduction(self.run_id, self.stage, round, reducer)
            grants[reducer] = sign_grant(self.identity, reduction, identity, tokens, cut.shards_of(reducer))
        return replace(cut, grants=grants)

    def _reduce(self, round: int, slices: Mapping[int, Mapping[Contributor, bytes]]) -> ContributionReady:
        """Reduce the slices of a round and return the signed result."""
        reduced = self.method.reduced
        assert reduced is not None
        if not slices:
            return ContributionReady(round, b"", 0, None, is_result=True)
        result = reduced.reduce(slices)
        table, head = reduced.head(result)
        sealed = self._sealed(round, table.tokens(reduced.draw.shards), result[:head], result[head:])
        return replace(sealed, is_result=True, table=table, signed=ENVELOPE_BYTES + head)

    def _encode_gradient(self, round: int) -> tuple[bytes | None, int]:
        """Return the payload, None if the gradient is not finite, and its number of tokens."""
        tokens = self.gathered.gathered_tokens
        self.gathered.gathered_tokens = 0
        me, contribute = self.identity.peer_id, self.method.contribute
        try:
            payload = self.stage_compute.use_gradient(
                lambda gradient: contribute(gradient, max(1, tokens), round, me)
            )
            return payload, tokens
        except GradientError:
            return None, tokens

    def _encode_local_delta(self, round: int, own: LocalOptimizer) -> tuple[bytes | None, int]:
        """Return the local delta since the last contribution, None without tokens, and its tokens.

        A gradient too small for a step waits for the next round, unless the contribution would be empty
        without it."""
        gathered = self.gathered.gathered_tokens
        if should_flush_partial_step(gathered, self._stepped_tokens, own.tokens):
            self._step(own)
        tokens = self._stepped_tokens
        self._stepped_tokens = 0
        return (own.encode_delta(round, self.identity.peer_id) if tokens else None), tokens
