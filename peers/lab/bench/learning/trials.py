"""Trials: one method at one rate from one seed, each kept on the disk when done.

OUT/trials.jsonl       one line a trial; what stands there is not computed again
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from time import perf_counter

from peers.lab.bench.learning.ground import Ground
from peers.lab.bench.learning.recipes import Recipe, Setting
from peers.lab.bench.learning.rounds import middle_third
from swarmnet.model.stage_compute import StageError

POINTS = 16
"""Of a curve, at equal distances."""
CURVE_EVERY = 8
"""Of the held-out text's batches, for a point of a curve: judging would else take as long as training."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Peaks: inside, and of the optimizer outside where a method has one."""

    rate: float
    outer: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be computed. Everything that decides the result is in it."""

    run_id: str
    """Of the manifest: model, text, stages, codec, method."""
    text: str
    """SHA-256 of what is judged on."""
    method: str
    rate: float
    seed: int
    peers: int
    steps: int
    delay: int = 0
    outer_lr: float | None = None
    away: int = 0
    late: float = 0.0
    local_steps: int = 0
    """Of a round, where somebody asked for other than the method's."""
    computed: str = ""
    """Where and in what numbers; empty: on the processor, in float32."""


@dataclass(frozen=True, slots=True)
class Point:
    """Of a curve."""

    tokens: int
    loss: float
    """Held out, nats per token."""
    sent_bytes: int
    """By one peer, in all."""
    trained: float | None = None
    """Mean loss in training since the last point. None: of a trial that was kept before this was."""


@dataclass(frozen=True, slots=True)
class Outcome:
    trial: Trial
    loss: float
    """Held out, at the end; infinite where it diverged."""
    bits_per_byte: float
    sent_bytes: int
    """By one peer."""
    tokens: int
    """Of all peers."""
    seconds: float
    curve: tuple[Point, ...]

    @property
    def bytes_per_token(self) -> float:
        """Of contributions, by one peer, for each token that it trained."""
        return self.sent_bytes / (self.tokens / self.trial.peers)


class StoredTrials:
    """The outcomes that are on the disk."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[Trial, Outcome] = {}
        for line in file.read_text().splitlines() if file.is_file() else ():
            if outcome := _outcome(line):
                self._found[outcome.trial] = outcome

    def find(self, trial: Trial) -> Outcome | None:
        return self._found.get(trial)

    def keep(self, outcome: Outcome) -> None:
        self._found[outcome.trial] = outcome
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What is the same for all trials of a run: as in Trial."""

    run_id: str
    text: str
    peers: int
    steps: int
    delay: int = 0
    away: int = 0
    late: float = 0.0
    local_steps: int = 0
    computed: str = ""

    def trial(self, name: str, recipe: Recipe, rates: Rates, seed: int) -> Trial:
        """Of the method that is called so."""
        return Trial(
            self.run_id, self.text, name, rates.rate, seed, self.peers, self.steps, self.delay, rates.outer,
            self.away, self.late, self.local_steps if recipe.local_steps else 0, self.computed,
        )  # fmt: skip


def play(trial: Trial, recipe: Recipe, ground: Ground, said: Callable[[int], None]) -> Outcome:
    """Compute a trial from its beginning to its end, or to where it diverges."""
    setting = Setting(
        trial.peers, trial.steps, trial.delay, trial.outer_lr, trial.away, trial.late, trial.local_steps
    )  # fmt: skip
    learner = recipe.make(ground, setting, trial.rate)
    tokens_of_a_step = trial.peers * ground.manifest.microbatch_tokens
    began, curve, losses = perf_counter(), [], list[float]()
    points = {round(trial.steps * number / POINTS) for number in range(1, POINTS + 1)}
    for step in range(trial.steps):
        try:
            losses.append(learner.step(step))
        except StageError:  # Not finite: this rate is too high.
            loss = inf
            break
        said(step + 1)
        if step + 1 in points:
            seen = ground.held_out_loss(learner.weights(), CURVE_EVERY)
            trained = sum(losses) / len(losses)
            curve.append(Point((step + 1) * tokens_of_a_step, seen, learner.sent_bytes, trained))
            losses.clear()
    else:
        loss = ground.held_out_loss(learner.weights())
    loss = loss if isfinite(loss) else inf
    missed = trial.away * len(middle_third(trial.steps)) * ground.manifest.microbatch_tokens
    return Outcome(
        trial, loss, ground.bits_per_byte(loss), learner.sent_bytes, trial.steps * tokens_of_a_step - missed,
        perf_counter() - began, tuple(curve),
    )  # fmt: skip


def mean_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Their mean, and the standard deviation of one of them (0 for a single one)."""
    numbers = list(values)
    mean = sum(numbers) / len(numbers)
    if len(numbers) < 2 or not isfinite(mean):
        return mean, 0.0
    return mean, (sum((each - mean) ** 2 for each in numbers) / (len(numbers) - 1)) ** 0.5


def _outcome(line: str) -> Outcome | None:
    """None for the half line of a process that was killed."""
    try:
        told = json.loads(line)
        curve = tuple(Point(**point) for point in told.pop("curve"))
        return Outcome(trial=Trial(**told.pop("trial")), curve=curve, **told)
    except (ValueError, TypeError, KeyError):
        return None
