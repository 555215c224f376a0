"""The tensor side of rounds: everything here runs in the compute thread, in the order in which it was
decided.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from itertools import islice

from peers.compute.stage_part import Computes, HasReplica
from peers.worker.rounds.contribution_source import HasGradient, contribution_source
from peers.worker.rounds.contribution_writer import contribution_writer
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
from protocols.signed.identity import Identity
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.optimizer.method import Method
from swarmnet.rounds.events import (
    ApplyRound,
    MakeContribution,
    RateRound,
    RemoveContribution,
    RestoreToMomentum,
    SettleRound,
)

HASHED_NUMBERS = 1 << 24
"""A state of at most this many numbers (64 MiB) is hashed after each round. A larger one is hashed only when
peers sign digests, because nothing is computed meanwhile."""
OWN_BYTES_KEPT = 64 << 20
"""Bytes of own contributions kept for their return after a fork; at 30 KB a round, over two thousand
rounds."""


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
        self.source = contribution_source(
            method=method,
            stage_compute=stage_compute,
            gathered=gathered,
            factor=lambda round: replica.factor(round),
            counts=counts,
            me=identity.peer_id,
        )
        self.writer = contribution_writer(method, identity, run_id, stage)
        self.settled = settled
        self.counts = counts
        self.undecided = undecided
        self.own: OrderedDict[ContributionId, bytes] = OrderedDict()
        """Payloads of own contributions: all undecided ones, and the newest up to OWN_BYTES_KEPT."""
        self.tokens: int | None = None
        """Tokens in all rounds settled in the replica; None if not known."""
        self.closed = False
        """Set when the state is fetched again: queued operations belong to an abandoned branch."""
        self._ahead = False
        """Whether the published weights include this peer's own momentum as a lookahead."""
        self._signs_every = signs_every

    def run(self, operations: Sequence[Operation]) -> list[Done]:
        """Run operations in order and publish the weights if they changed; returns their results."""
        results: list[Done] = []
        stale = False
        for operation in operations:
            match operation:
                case MakeContribution(round, _, reducers):
                    results.append(self._make(round, reducers))
                    self._ahead = self.source.has_lookahead
                    stale |= self.source.switch_experts(round) or self._ahead
                    results += self.source.reassignment(round)
                case ReduceShards(round, slices):
                    results.append(self.writer.reduce(round, slices))
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
        if not self.closed and self.source.step_if_due():
            self._publish()

    def publish(self) -> None:
        """Publish the live weights for the next microbatches."""
        self.source.published(self.replica.applied_round)
        self._publish()

    def _publish(self) -> None:
        self.stage_compute.publish(self.replica.live_tiles(self._ahead))

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
        payload, tokens = self.source.encode(round)
        if payload is None:
            self.counts.not_finite += 1
            return self.writer.write_nothing(round, reducers, tokens)
        self.counts.norms = self.method.gradient_norm, self.method.momentum_norm
        made = self.writer.write(round, reducers, tokens, payload)
        assert made.id is not None
        self.own[made.id] = payload
        self._forget_oldest(len(payload), made.id)
        return made
