"""What a peer contributes to a round, and the local steps before it. All runs in the compute thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

from peers.compute.stage_part import Computes, HasReplica
from peers.worker.rounds.operations import ExpertChange
from peers.worker.rounds.round_counts import RoundCounts
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.method import GradientError, LocalOptimizer, Method, should_flush_partial_step
from swarmnet.run.rates import WHOLE


class HasGradient(Protocol):
    """The owner of the gradient that a contribution takes (the pipeline service)."""

    gathered_tokens: int


@dataclass(eq=False, kw_only=True)
class GatheredGradient:
    """The form without local steps: a contribution takes the gathered gradient."""

    has_lookahead: ClassVar[bool] = True
    """Whether live weights include this peer's own momentum once it has contributed."""
    warmup_steps: int = field(default=0, init=False)
    """Local optimizer steps left that only fill the moment estimates. While there are any, committed tokens
    are not counted."""

    method: Method
    stage_compute: Computes
    gathered: HasGradient
    replica: HasReplica
    counts: RoundCounts
    me: PeerId

    def warm_up(self, steps: int) -> None:
        """Begin with `steps` local steps as warm-up. Called for a newcomer before it serves."""

    def published(self, applied_round: int) -> None:
        """Called when the published weights include all rounds up to `applied_round`."""

    def step_if_due(self) -> bool:
        """Make a local optimizer step if enough tokens were gathered; returns whether one was tried."""
        return False

    def encode(self, round: int) -> tuple[bytes | None, int]:
        """Return the payload, None without a finite gradient, and its number of tokens."""
        tokens = self.gathered.gathered_tokens
        self.gathered.gathered_tokens = 0
        me, contribute = self.me, self.method.contribute
        try:
            payload = self.stage_compute.use_gradient(
                lambda gradient: contribute(gradient, max(1, tokens), round, me)
            )
            return payload, tokens
        except GradientError:
            return None, tokens

    def switch_experts(self, round: int) -> bool:
        """Switch to other experts if it is this peer's turn; returns whether it switched."""
        return False

    def reassignment(self, round: int) -> list[ExpertChange]:
        """Return the new assignment of experts if it has changed."""
        return []


@dataclass(eq=False, kw_only=True)
class LocalStepping(GatheredGradient):
    """The form with local steps: a contribution is the local delta since the last one."""

    has_lookahead = False

    own: LocalOptimizer
    _stepped_tokens: int = field(default=0, init=False)
    """Tokens in local steps since the last contribution."""
    _published_round: int = field(default=-1, init=False)
    """The newest applied round in the published weights."""
    _rate: tuple[int, int] | None = field(default=None, init=False)
    """The round after the published one and its learning-rate factor, as of the newest microbatch."""

    def warm_up(self, steps: int) -> None:
        self.warmup_steps = steps

    def published(self, applied_round: int) -> None:
        self._published_round = applied_round

    def step_if_due(self) -> bool:
        round = self._published_round + 1
        self._rate = round, 0 if self.warmup_steps else self.replica.factor(round)
        if self.gathered.gathered_tokens < self.own.tokens:
            return False
        self._step()
        return True

    def _step(self) -> None:
        tokens = self.gathered.gathered_tokens
        self.gathered.gathered_tokens = 0
        round, factor = self._rate or (self._published_round + 1, WHOLE)
        try:
            self.stage_compute.use_gradient(
                lambda gradient: self.own.step(gradient, max(1, tokens), round, factor)
            )
        except GradientError:
            self.counts.not_finite += 1
            return
        if self.warmup_steps:
            self.warmup_steps -= 1
        else:
            self._stepped_tokens += tokens

    def encode(self, round: int) -> tuple[bytes | None, int]:
        """Return the local delta since the last contribution, None without tokens, and its tokens.

        A gradient too small for a step waits for the next round, unless the contribution would be empty
        without it."""
        gathered = self.gathered.gathered_tokens
        if should_flush_partial_step(gathered, self._stepped_tokens, self.own.tokens):
            self._step()
        tokens = self._stepped_tokens
        self._stepped_tokens = 0
        return (self.own.encode_delta(round, self.me) if tokens else None), tokens


@dataclass(eq=False, kw_only=True)
class ExpertStepping(LocalStepping):
    """The form with local steps by a peer that trains some of the experts."""

    held: ExpertShardSteps
    _joins: int = field(default=0, init=False)
    """Warm-up steps to repeat if this peer switches to the experts with the fewest peers, as soon as it knows
    them; 0 keeps its experts."""
    _reported: tuple[int, tuple[int, ...]] | None = field(default=None, init=False)
    """The group of experts last reported, and the groups without a peer then."""

    def __post_init__(self) -> None:
        if self.held.begins(self.me):
            self.stage_compute.train(self.held.trained)

    def warm_up(self, steps: int) -> None:
        self.warmup_steps = steps
        self._joins = steps

    def step_if_due(self) -> bool:
        return not self._join_fewest() and super().step_if_due()

    def _join_fewest(self) -> bool:
        """Switch to the experts that the fewest peers train, while this peer is new; returns whether it
        switched."""
        steps = self._joins
        if not (steps and self.warmup_steps and self.held.knows_holders):
            return False
        self._joins = 0
        if not self.held.joins():
            return False
        self.warmup_steps = steps
        self._train_assigned()
        return True

    def switch_experts(self, round: int) -> bool:
        if not self.held.goes_over(round, self.me):
            return False
        self._train_assigned()
        return True

    def _train_assigned(self) -> None:
        """Train the assigned experts from now on, and discard gradients gathered for the ones before."""
        self.gathered.gathered_tokens = 0
        self.stage_compute.train(self.held.trained)

    def reassignment(self, round: int) -> list[ExpertChange]:
        held, holders = self.held, self.held.holders()
        assignment = held.group, tuple(group for group, count in enumerate(holders) if not count)
        if assignment == self._reported or not any(holders):
            return []
        self._reported = assignment
        return [ExpertChange(round, held.experts, held.group, tuple(holders))]


def contribution_source(method: Method) -> Callable[..., GatheredGradient]:
    """Return the constructor of the form that the method needs."""
    if method.own is None:
        return GatheredGradient
    if method.held is None:
        return partial(LocalStepping, own=method.own)
    return partial(ExpertStepping, own=method.own, held=method.held)
