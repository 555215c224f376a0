"""The shape in which given peers come soonest to the loss that one of them alone would come to.

Tokens per second are not what counts: many replicas and large steps need more tokens for the same loss
(laws.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf, isinf

from peers.errors import UserError
from peers.lab.planner.exchange import exchange_of, parameters_of
from peers.lab.planner.plan import DAY, alone, plan
from peers.lab.planner.plan_request import PlanRequest, PlanResult, SinglePeerBaseline
from peers.lab.planner.shape import laws
from peers.lab.planner.shape.candidates import Judge, Judged, Shape, price, shapes
from swarmnet.run.manifest import Manifest

PLAYED = 4
"""Of the best, each with other stages or another exchange: a minute or two in the simulator."""
ALIKE = 1.02
"""Times to the loss within this factor are equal: what is played differs by as much from seed to seed."""


@dataclass(frozen=True, slots=True)
class PlayedShape:
    """A shape that was played."""

    shape: Shape
    answer: PlanResult
    loss_factor: float
    """Of the loss at as many tokens as one alone needs."""
    tokens_factor: float
    """Times the tokens to the loss of one alone."""
    days: float
    """To that loss."""
    same_tokens_days: float
    exchange_seconds: float
    """That a round's contributions take of the slowest line, of the group that they take longest in."""


@dataclass(frozen=True, slots=True)
class Search:
    parameters: int
    target: int
    """Tokens that one alone trains."""
    alone: SinglePeerBaseline
    looked_at: int
    fitting: int
    """Of these, for which the peers have memory."""
    found: tuple[PlayedShape, ...]
    """The best first."""
    as_it_is: PlayedShape | None
    """The run as its file has it; None: nothing comes of that."""
    why_not: str = ""

    @property
    def tokens(self) -> int:
        """That the best shape trains: to the loss of one alone, or as many if that is never reached."""
        factor = self.found[0].tokens_factor
        return ceil(self.target * (1.0 if isinf(factor) else factor))

    @property
    def rounds(self) -> int:
        """Of the best shape."""
        return max(1, ceil(self.tokens / self.found[0].shape.round_tokens))

    @property
    def alone_days(self) -> float:
        return self.target / self.alone.tokens_per_second / DAY if self.alone.fits else inf


def search(run: Manifest, question: PlanRequest) -> Search:
    """Raises UserError where no shape is found. The run's stages, microbatches and rounds do not count."""
    parameters = parameters_of(replace(run, stages=(run.model.num_hidden_layers,)), 0)
    target = question.tokens or laws.TOKENS_PER_PARAMETER * parameters
    judge = Judge(run, question, parameters, target)
    every = list(shapes(run, parameters, sum(one.count for one in question.classes)))
    judged = [one for one in map(judge.judged, every) if one is not None]
    found = [
        one for one in (_played(run, question, best, parameters, target) for best in _best(judged)) if one
    ]
    if not found:
        raise UserError("no shape of this model is trained by such peers: they lack memory, or lines")
    as_it_is, why_not = _as_it_is(run, question, parameters, target)
    found.sort(key=lambda one: one.days)
    counts = len(every), len(judged)
    return Search(parameters, target, alone(run, question), *counts, tuple(found), as_it_is, why_not)


def _best(judged: Iterable[Judged]) -> list[Judged]:
    """Of each number of stages and exchange the simplest that is about as soon as the soonest; of these the
    best few."""
    kept: dict[tuple[int, str, bool], list[Judged]] = {}
    for one in judged:
        if one.tokens_per_second > 0:
            kept.setdefault((len(one.shape.stages), one.shape.exchange, one.shape.local), []).append(one)
    found = []
    for alike in kept.values():
        soonest = min(one.seconds for one in alike)
        found.append(min((one for one in alike if one.seconds <= ALIKE * soonest), key=_simplest))
    return sorted(found, key=lambda one: (one.seconds, len(one.shape.stages)))[:PLAYED]


def _simplest(one: Judged) -> tuple[int, int]:
    """With frequent rounds; microbatches are large where none travels, and small where they do."""
    shape = one.shape
    return shape.round_tokens, shape.sequences if len(shape.stages) > 1 else -shape.sequences


def _played(
    run: Manifest, question: PlanRequest, best: Judged, parameters: int, target: int
) -> PlayedShape | None:
    round_seconds = best.shape.round_tokens / best.tokens_per_second
    manifest = best.shape.manifest(run, round_seconds)
    try:
        return _found(manifest, question, best.shape, parameters, target)
    except UserError:
        return None


def _as_it_is(
    run: Manifest, question: PlanRequest, parameters: int, target: int
) -> tuple[PlayedShape | None, str]:
    step = exchange_of(run).inner_batch_tokens
    shape = Shape(
        run.stages, run.data.micro_batch_size, run.sync.topology, run.rounds.global_batch_tokens, step,
        run.sync.fragments,
    )  # fmt: skip
    try:
        return _found(run, question, shape, parameters, target), ""
    except UserError as error:
        return None, str(error)


def _found(
    manifest: Manifest, question: PlanRequest, shape: Shape, parameters: int, target: int
) -> PlayedShape:
    how = exchange_of(manifest)
    answer = plan(manifest, replace(question, tokens=target), how)
    replicas = sum(answer.peers) / len(answer.peers)
    loss, tokens = price(parameters, target, shape, replicas)
    if not shape.local:  # Fewer useful tokens, if their steps are large.
        loss = laws.loss_of_one(parameters, target / tokens) / laws.loss_of_one(parameters, target)
    line = min(min(one.up, one.down) for one in question.classes if one not in answer.left_out)
    exchange = max(how.per_round(stage, group) for stage, group in enumerate(answer.peers)) / line
    return PlayedShape(shape, answer, loss, tokens, tokens * answer.days, answer.days, exchange)
