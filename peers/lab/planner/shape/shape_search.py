"""Search for the shape in which given peers reach a loss soonest; it is the loss that one peer alone reaches.

Shapes are not compared by tokens per second, because many replicas and large batches need more tokens for the
same loss (laws.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf, isinf

from peers.config.errors import UserError
from peers.lab.planner.exchange import exchange_of, parameters_of
from peers.lab.planner.plan import DAY, alone, plan
from peers.lab.planner.plan_request import PlanRequest, PlanResult, SinglePeerBaseline
from peers.lab.planner.shape import laws
from peers.lab.planner.shape.candidates import Judge, Judged, Shape, price, shapes
from swarmnet.run.loss_law import LossLaw
from swarmnet.run.manifest import Manifest

PLAYED = 4
"""Number of the best shapes that are simulated; they differ in stages or exchange. Takes a minute or two."""
ALIKE = 1.02
"""Durations until the loss within this factor count as equal; other seeds differ as much."""


@dataclass(frozen=True, slots=True)
class PlayedShape:
    """A shape with its simulated speed."""

    shape: Shape
    answer: PlanResult
    law: LossLaw
    """The law by which its loss is expected."""
    loss_factor: float
    """Loss at equal tokens, divided by the loss of one peer alone."""
    tokens_factor: float
    """Tokens to the loss of one peer alone, divided by the tokens that it needs."""
    days: float
    """Days to the loss of one peer alone."""
    same_tokens_days: float
    """Days to as many tokens as one peer alone needs."""
    exchange_seconds: float
    """Seconds of one round's contributions on the slowest link, in the stage where that takes longest."""


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search for the best shape."""

    parameters: int
    target: int
    """Tokens that one peer alone would train."""
    alone: SinglePeerBaseline
    looked_at: int
    """Number of candidate shapes."""
    fitting: int
    """Number of candidate shapes for which the peers have enough memory."""
    found: tuple[PlayedShape, ...]
    """Simulated shapes, best first."""
    as_it_is: PlayedShape | None
    """The run with the shape of its file; None if that cannot train."""
    why_not: str = ""
    """Why the run cannot train with the shape of its file."""

    @property
    def tokens(self) -> int:
        """Return the tokens that the best shape needs to the loss of one peer alone.

        If it never reaches that loss, the tokens that one peer alone trains.
        """
        factor = self.found[0].tokens_factor
        return ceil(self.target * (1.0 if isinf(factor) else factor))

    @property
    def rounds(self) -> int:
        return max(1, ceil(self.tokens / self.found[0].shape.round_tokens))

    @property
    def alone_days(self) -> float:
        return self.target / self.alone.tokens_per_second / DAY if self.alone.fits else inf


def search(run: Manifest, question: PlanRequest) -> Search:
    """Search for the best shape; the run's own stages, microbatches and rounds are ignored.

    Raises UserError if no shape is found.
    """
    parameters = parameters_of(replace(run, stages=(run.model.num_hidden_layers,)), 0)
    target = question.tokens or laws.TOKENS_PER_PARAMETER * parameters
    judge = Judge(run=run, question=question, parameters=parameters, target=target)
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
    """Return the best few candidates, at most one for each number of stages and kind of exchange.

    For each of these it is the simplest candidate that is about as soon as the soonest.
    """
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
    """Return a sort key: frequent rounds first, then large microbatches in one stage, else small ones."""
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
        run.stages,
        run.data.micro_batch_size,
        run.sync.topology,
        run.rounds.global_batch_tokens,
        step,
        run.sync.fragments,
    )
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
    loss, tokens = price(
        law=manifest.sync.config.loss_law,
        parameters=parameters,
        target=target,
        shape=shape,
        replicas=replicas,
        contribution_bytes=sum(how.contribution),
    )
    line = min(min(one.up, one.down) for one in question.classes if one not in answer.left_out)
    exchange = max(how.per_round(stage, group) for stage, group in enumerate(answer.peers)) / line
    return PlayedShape(
        shape=shape,
        answer=answer,
        law=manifest.sync.config.loss_law,
        loss_factor=loss,
        tokens_factor=tokens,
        days=tokens * answer.days,
        same_tokens_days=answer.days,
        exchange_seconds=exchange,
    )
