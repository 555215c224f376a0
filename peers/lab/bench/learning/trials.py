"""Trials of the learning benchmark: one method at one learning rate with one seed.

OUT/trials.jsonl       one line for each finished trial; these trials are not computed again
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from time import perf_counter

from peers.lab.bench.learning.ground import Ground
from peers.lab.bench.learning.play_rounds import middle_third
from peers.lab.bench.learning.recipes import Recipe, Setting
from swarmnet.model.stage_compute import StageError

POINTS = 16
"""Number of points of a loss curve, at equal distances."""
CURVE_EVERY = 8
"""A point of a curve uses every 8th held-out batch; all batches would take as long as the training."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates of the inner optimizer, and of the outer one if the method has one."""

    rate: float
    outer: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Setting):
    """The definition of a trial; equal definitions give equal results."""

    run_id: str
    """Run id of the manifest, which covers model, text, stages, codec and method."""
    text: str
    """SHA-256 of the held-out text."""
    method: str
    rate: float
    """Peak learning rate."""
    seed: int
    computed: str = ""
    """Number format and device, such as "bf16 cuda"; empty: float32 on the CPU."""
    split: str = ""
    """How the text is divided among owners (`text_split.py`); empty: all peers have all of it."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a loss curve."""

    tokens: int
    loss: float
    """Held-out loss in nats per token."""
    sent_bytes: int
    """Bytes of contributions that one peer has sent so far."""
    trained: float | None = None
    """Mean training loss since the last point; None in trials that were stored before this field existed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial."""

    trial: Trial
    loss: float
    """Held-out loss at the end in nats per token; infinite if the trial diverged."""
    bits_per_byte: float
    sent_bytes: int
    """Bytes of contributions that one peer sent."""
    tokens: int
    """Tokens that all peers trained."""
    seconds: float
    curve: tuple[Point, ...]
    vote_weights: tuple[float, ...] = ()
    """Weight of each peer's votes by agreement, 0 to 1, mean over the rounds; empty if all are equal."""
    owner_losses: tuple[float, ...] = ()
    """Held-out loss on the text of each owner; empty if owners have none of their own, or it diverged."""

    @property
    def bytes_per_token(self) -> float:
        """Return the contribution bytes of one peer for each token that it trained."""
        return self.sent_bytes / (self.tokens / self.trial.peers)


class StoredTrials:
    """The outcomes in a trials file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[Trial, Outcome] = {}
        for line in file.read_text().splitlines() if file.is_file() else ():
            if outcome := _outcome(line):
                self._found[outcome.trial] = outcome

    def find(self, trial: Trial) -> Outcome | None:
        """Return the stored outcome of a trial; None if there is none."""
        return self._found.get(trial)

    def keep(self, outcome: Outcome) -> None:
        """Append an outcome to the file."""
        self._found[outcome.trial] = outcome
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def play(trial: Trial, recipe: Recipe, ground: Ground, said: Callable[[int], None]) -> Outcome:
    """Run a trial to its end, or until it diverges. `said` receives the number of finished steps."""
    learner = recipe.make(ground, trial, trial.rate)
    tokens_of_a_step = trial.peers * ground.manifest.microbatch_tokens
    began, curve, losses = perf_counter(), [], list[float]()
    owner_losses: tuple[float, ...] = ()
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
        owner_losses = ground.losses_of_owners(learner.weights())
    loss = loss if isfinite(loss) else inf
    missed = trial.away * len(middle_third(trial.steps)) * ground.manifest.microbatch_tokens
    return Outcome(
        trial,
        loss,
        ground.bits_per_byte(loss),
        learner.sent_bytes,
        trial.steps * tokens_of_a_step - missed,
        perf_counter() - began,
        tuple(curve),
        learner.vote_weights,
        owner_losses,
    )


def mean_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (0 for a single value)."""
    numbers = list(values)
    mean = sum(numbers) / len(numbers)
    if len(numbers) < 2 or not isfinite(mean):
        return mean, 0.0
    return mean, (sum((each - mean) ** 2 for each in numbers) / (len(numbers) - 1)) ** 0.5


def _outcome(line: str) -> Outcome | None:
    """Parse a line of the trials file; None for the incomplete line of a killed process."""
    try:
        fields = json.loads(line)
        curve = tuple(Point(**point) for point in fields.pop("curve"))
        weights, owner_losses = (tuple(fields.pop(key, ())) for key in ("vote_weights", "owner_losses"))
        trial = Trial(**fields.pop("trial"))
        return Outcome(trial=trial, curve=curve, vote_weights=weights, owner_losses=owner_losses, **fields)
    except (ValueError, TypeError, KeyError):
        return None
