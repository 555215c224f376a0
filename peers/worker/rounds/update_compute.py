"""The tensor side of rounds: everything here runs in the compute thread, in the order that was decided."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from peers.compute.stage_part import Computes, Holds
from peers.worker.rounds.counters import RoundCounts
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
    GiveBack,
    MakeContribution,
    RateRound,
    Reference,
    RemoveContribution,
    SettleRound,
)
from swarmnet.rounds.result_table import Contributor, Table
from swarmnet.run.rates import WHOLE

HASHED_NUMBERS = 1 << 24
"""Of a state that is hashed after each round: 64 MiB. A larger one is hashed when peers sign what they have,
for meanwhile nothing is computed."""
OWN_BYTES_KEPT = 64 << 20
"""Own contributions kept for giving back after a fork; at 30 KB a round, over two thousand rounds."""


class Gathered(Protocol):
    """Whose gradient a contribution takes (the data path)."""

    gathered_tokens: int


@dataclass(frozen=True, slots=True)
class Add:
    round: int
    peer: PeerId
    payload: bytes


@dataclass(frozen=True, slots=True)
class ContributionReady:
    """A contribution; empty if no gradient was finite."""

    round: int
    data: bytes
    tokens: int
    id: ContributionId | None
    is_result: bool = False
    """This peer has added up what others contributed."""
    table: Table | None = None
    """Of a result."""
    signed: int = 0
    """Of a result: the bytes at its beginning that are signed, and name the rest. 0: all of it is signed."""


@dataclass(frozen=True, slots=True)
class SlicedContribution:
    """A contribution for reducers; no name if no gradient was finite."""

    round: int
    reducers: tuple[PeerId, ...]
    """By shard."""
    tokens: int
    head: bytes = b""
    """Goes before the slices (protocols/signed/slices.py)."""
    slices: tuple[bytes, ...] = ()
    id: ContributionId | None = None
    grants: Mapping[PeerId, bytes] = field(default_factory=dict)
    """For each reducer the signature that lets it add up its slices (protocols/signed/grants.py)."""

    def shards_of(self, reducer: PeerId) -> list[int]:
        """Return the shards whose slices go to this reducer, in order."""
        return [shard for shard, drawn in enumerate(self.reducers) if drawn == reducer]


@dataclass(frozen=True, slots=True)
class ReduceShards:
    """What came of a round, by shard, for this peer to reduce."""

    round: int
    slices: Mapping[int, Mapping[Contributor, bytes]]


@dataclass(frozen=True, slots=True)
class Settled:
    round: int
    digest: bytes
    """Replica.digest() after it; or NOT_HASHED."""
    chain: bytes
    references: tuple[Reference, ...]
    tokens: int | None = None
    """In all settled rounds up to it; None: not known."""
    contributors: tuple[PeerId, ...] = ()
    """Who has contributed to it, as far as they are known."""


@dataclass(frozen=True, slots=True)
class ExpertsReassigned:
    """This peer trains other experts now, or some have lost or found a holder."""

    round: int
    experts: range
    group: int
    holders: tuple[int, ...]
    """Of each group."""


Operation = (
    MakeContribution
    | ReduceShards
    | Add
    | RemoveContribution
    | RateRound
    | ApplyRound
    | SettleRound
    | GiveBack
)
Done = ContributionReady | SlicedContribution | Settled | ExpertsReassigned


def experts_line(took_up: ExpertsReassigned) -> str:
    """For people."""
    first, last = took_up.experts[0], took_up.experts[-1]
    which = f"expert {first}" if first == last else f"experts {first} to {last}"
    counts = ", ".join(map(str, took_up.holders))
    encode_tokens = f"trains {which} of each layer; each group of them has {counts} peers"
    others = ((group, count) for group, count in enumerate(took_up.holders) if group != took_up.group)
    alone = [str(group) for group, count in others if not count]
    if not alone:
        return encode_tokens
    return (
        f"{encode_tokens}; what nobody trains, group {' and '.join(alone)}, stays as it is until a "
        "peer takes it up"
    )


class UpdateWork:
    def __init__(
        self,
        run_id: RunId,
        stage: int,
        identity: Identity,
        stage_compute: Computes,
        method: Method,
        replica: Holds,
        gathered: Gathered,
        settled: Callable[[Settled], None],
        counts: RoundCounts,
        undecided: Container[ContributionId],
        signs_every: int = 1,
    ) -> None:
        """`settled` is called right after a round settled, before anything else changes the weights.
        `undecided`: own contributions of which it is open what becomes of them. `signs_every`: of so many
        rounds one's digest is signed (rounds.snapshot_interval)."""
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
        """Payloads of the own contributions: all that are undecided, and the newest OWN_BYTES_KEPT."""
        self.tokens: int | None = None
        """In all rounds that are settled in the replica; None: not known."""
        self.closed = False
        """The state is fetched anew: what is still queued is of a history that was given up."""
        self.optimizer_warmup_steps = 0
        """So many own steps move nothing yet; while there are any, nobody counts what this peer commits. Set
        by a newcomer before it serves, then counted down in the compute thread."""
        self.joins = 0
        """While its own steps move nothing yet, this peer takes up the experts that the fewest train, as soon
        as it knows, and takes so many such steps again. Set by a newcomer before it serves; 0: it stays."""
        self._told: tuple[int, tuple[int, ...]] | None = None
        """The group of experts that this peer was last said to train, and those without a holder then."""
        held = method.held
        if held is not None and held.begins(identity.peer_id):
            stage_compute.train(held.trained)
        self._ahead = False
        """Weights are published moved ahead by the own momentum."""
        self._stepped_tokens = 0
        """In own steps since the last contribution."""
        self._published_round = -1
        """The newest applied round in the weights that are computed with."""
        self._signs_every = signs_every
        self._rate: tuple[int, int] | None = None
        """The round after the published one, and its learning-rate factor, at the newest microbatch."""

    def run(self, operations: Sequence[Operation]) -> list[Done]:
        """Do them in order and publish the weights if they changed."""
        results: list[Done] = []
        stale = False
        for operation in operations:
            match operation:
                case MakeContribution(round, _, reducers):
                    results.append(self._make(round, reducers))
                    self._ahead = self.method.own is None
                    stale |= self._goes_over(round) or self._ahead
                    results += self._took_up(round)
                case ReduceShards(round, slices):
                    results.append(self._add_up(round, slices))
                case Add(round, peer, payload):
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
                    self._ahead, stale = False, True
                case SettleRound(round, references, chain, tokens, contributors):
                    digest = self.replica.settle(round, self._hashes(round))
                    result = Settled(round, digest, chain, references, tokens, contributors)
                    self.tokens = tokens
                    if not self.closed:
                        self.settled(result)
                    results.append(result)
                case GiveBack(round, identity, shards):
                    self.give_back(round, identity, shards)
        if stale:
            self.publish()
        return results

    def _hashes(self, round: int) -> bool:
        return self.replica.size <= HASHED_NUMBERS or (round + 1) % self._signs_every == 0

    def step_if_due(self) -> None:
        """Where peers step by themselves: step by what was gathered, if that is enough, and publish."""
        own = self.method.own
        if own is None or self.closed:
            return
        if self._joins():
            return
        round = self._published_round + 1
        self._rate = round, 0 if self.optimizer_warmup_steps else self.replica.factor(round)
        if self.gathered.gathered_tokens < own.tokens:
            return
        self._step(own)
        self._publish()

    def publish(self) -> None:
        """Compute with the live weights as they are now."""
        self._published_round = self.replica.applied_round
        self._publish()

    def _publish(self) -> None:
        self.stage_compute.publish(self.replica.live_tiles(self._ahead))

    def _step(self, own: LocalOptimizer) -> None:
        tokens, self.gathered.gathered_tokens = self.gathered.gathered_tokens, 0
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

    def _joins(self) -> bool:
        """As a newcomer, those who train other experts than it drew; whether it did."""
        held, joins = self.method.held, self.joins
        if not (joins and self.optimizer_warmup_steps and held is not None and held.knows_holders):
            return False
        self.joins = 0
        if not held.joins():
            return False
        self.optimizer_warmup_steps = joins
        self._trains_others(held)
        return True

    def _goes_over(self, round: int) -> bool:
        """To other experts, if it is this peer's turn."""
        held = self.method.held
        if held is None or not held.goes_over(round, self.identity.peer_id):
            return False
        self._trains_others(held)
        return True

    def _trains_others(self, held: ExpertShardSteps) -> None:
        """Of what it gathered for the experts that it gives up nothing is left to train."""
        self.gathered.gathered_tokens = 0
        self.stage_compute.train(held.trained)

    def _took_up(self, round: int) -> list[ExpertsReassigned]:
        """What is new about who holds which experts, if anything is."""
        held = self.method.held
        if held is None:
            return []
        holders = held.holders()
        encode_tokens = held.group, tuple(group for group, count in enumerate(holders) if not count)
        if encode_tokens == self._told or not any(holders):
            return []
        self._told = encode_tokens
        return [ExpertsReassigned(round, held.experts, held.group, tuple(holders))]

    def give_back(self, round: int, identity: ContributionId, shards: tuple[int, ...] = ()) -> None:
        """Return the votes of an own contribution to the momentum, or those of some shards, if they are still
        kept."""
        payload = self.own.get(identity) if shards else self.own.pop(identity, None)
        if payload is not None:
            self.method.give_back(payload, round, self.identity.peer_id, shards)

    def _forget_oldest(self, size: int, newest: ContributionId) -> None:
        """As many as are too many, of those that are settled: an undecided one may have to be given back."""
        surplus = len(self.own) - OWN_BYTES_KEPT // max(1, size)
        decided = (name for name in self.own if name != newest and name not in self.undecided)
        for name in list(islice(decided, max(0, surplus))):
            del self.own[name]

    def _make(self, round: int, reducers: tuple[PeerId, ...]) -> ContributionReady | SlicedContribution:
        own = self.method.own
        if own is None:
            payload, tokens = self._by_gradient(round)
        else:
            payload, tokens = self._by_moves(round, own)
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
        """`rest`: what the payload names by its digest."""
        stands_for = encode_tokens(tokens, round)
        data = seal(
            self.identity, self.run_id, EnvelopeKind.CONTRIBUTION, self.stage, round, stands_for, payload
        )
        assert len(data) == ENVELOPE_BYTES + len(payload)
        envelope = open_envelope(data, self.run_id, EnvelopeKind.CONTRIBUTION, len(payload))
        return ContributionReady(round, data + rest, tokens, envelope.id)

    def _cut(
        self, round: int, reducers: tuple[PeerId, ...], tokens: int, payload: bytes
    ) -> SlicedContribution:
        assert self.method.reduced is not None
        slices = self.method.reduced.slices(payload)
        head, identity = sign_slices(self.identity, self.run_id, self.stage, round, tokens, slices)
        cut = SlicedContribution(round, reducers, tokens, head, tuple(slices), identity)
        grants = {}
        for reducer in set(reducers):
            reduction = Reduction(self.run_id, self.stage, round, reducer)
            grants[reducer] = sign_grant(self.identity, reduction, identity, tokens, cut.shards_of(reducer))
        return replace(cut, grants=grants)

    def _add_up(self, round: int, slices: Mapping[int, Mapping[Contributor, bytes]]) -> ContributionReady:
        """The result, for the round's set."""
        reduced = self.method.reduced
        assert reduced is not None
        if not slices:
            return ContributionReady(round, b"", 0, None, is_result=True)
        result = reduced.reduce(slices)
        table, head = reduced.head(result)
        sealed = self._sealed(round, table.tokens(reduced.draw.shards), result[:head], result[head:])
        return replace(sealed, is_result=True, table=table, signed=ENVELOPE_BYTES + head)

    def _by_gradient(self, round: int) -> tuple[bytes | None, int]:
        """The payload, None if the gradient is not finite, and the tokens it stands for."""
        tokens, self.gathered.gathered_tokens = self.gathered.gathered_tokens, 0
        me, contribute = self.identity.peer_id, self.method.contribute
        try:
            payload = self.stage_compute.use_gradient(
                lambda gradient: contribute(gradient, max(1, tokens), round, me)
            )
            return payload, tokens
        except GradientError:
            return None, tokens

    def _by_moves(self, round: int, own: LocalOptimizer) -> tuple[bytes | None, int]:
        """Likewise, of own steps. What is too little for a step yet waits for the next round, unless it is
        all that there is."""
        gathered = self.gathered.gathered_tokens
        if should_flush_partial_step(gathered, self._stepped_tokens, own.tokens):
            self._step(own)
        tokens, self._stepped_tokens = self._stepped_tokens, 0
        return (own.encode_delta(round, self.identity.peer_id) if tokens else None), tokens
