"""The learning benchmark of a run: find a learning rate for each method, run all seeds, and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from peers.compute.stage_part import CPU, computing_of
from peers.config.compute_file import ComputeFile
from peers.config.errors import UserError
from peers.data.documents import fingerprint
from peers.lab.bench.learning.learning_report import LearningReport, MethodRow, activation_bytes, row
from peers.lab.bench.learning.played import Play, Said, TrialSubject, player
from peers.lab.bench.learning.rate_search import SearchResult, carried_out, plan
from peers.lab.bench.learning.recipes import Recipe, recipes
from peers.lab.bench.learning.trials import Outcome, Rates, StoredTrials, Trial
from swarmnet.run.manifest import Manifest

TOKENS_PER_PARAMETER = 20
"""Compute-optimal number of training tokens per parameter (arXiv:2203.15556)."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Options of the learning benchmark."""

    run_file: Path
    methods: Sequence[str]
    """Names of the methods to compare; empty: all."""
    tokens: int | None
    """Training tokens of all peers together; None: `TOKENS_PER_PARAMETER` for each parameter."""
    microbatches: int | None
    """Microbatches of each peer, instead of `tokens`."""
    seeds: int
    peers: int
    delay: int
    out: Path
    eval_text: Path | None = None
    tokenizer: Path | None = None
    away: int = 0
    late: float = 0.0
    rate: float | None = None
    """Learning rate of all methods; None: each method's is searched."""
    local_steps: int = 0
    """Local steps of a round; 0: each method's own number."""
    liars: str = ""
    """Number and kind of peers that lie, as `N:KIND` (`liars.py`); empty: none."""
    split: str = ""
    """How the text is divided among owners (`text_split.py`); empty: all peers have all of it."""
    device: torch.device = CPU
    """Device of the trials; on a GPU they use bfloat16 if it has that, like a peer."""
    jobs: int = 1
    """Number of trials at a time. The trials and their outcomes do not depend on it."""


def bench(question: BenchConfig, said: Said) -> LearningReport:
    """Run the trials whose outcomes are not in the folder `out`, and return the report of all.

    `said` receives progress. Raises UserError and TextError.
    """
    subject = TrialSubject(
        question.run_file, question.eval_text, question.tokenizer, question.device, question.split
    )
    known = _recipes(question, subject.manifest())
    ground = subject.ground(0)
    manifest, computed = ground.manifest, computing_of(ComputeFile(), question.device).dtype
    tokens_of_a_step = question.peers * manifest.microbatch_tokens
    tokens = question.tokens or TOKENS_PER_PARAMETER * ground.count
    steps = question.microbatches or max(1, tokens // tokens_of_a_step)
    shared = partial(
        Trial,
        run_id=manifest.run_id(),
        text=fingerprint(subject.texts().held_out.scored),
        peers=question.peers,
        steps=steps,
        delay=question.delay,
        away=question.away,
        late=question.late,
        liars=question.liars,
        computed="" if question.device.type == "cpu" else f"{computed} {question.device.type}",
        split=question.split,
    )
    question.out.mkdir(parents=True, exist_ok=True)
    plans = {}
    for name, recipe in known.items():
        begin_rate = recipe.begin_rate if question.rate is None else question.rate
        begin = Rates(begin_rate, recipe.begin_outer)
        plans[name] = plan(begin, question.seeds, searches=question.rate is None)
    with player(subject, question.jobs, said) as play:
        found = carried_out(plans, question.jobs, _kept(question, shared, known, play))
    rows = [_row(name, known[name], question, found[name]) for name in known]
    return LearningReport(
        manifest.name,
        ground.count,
        rows[0].outcomes[0].tokens,
        question.peers,
        question.delay,
        question.away,
        question.late,
        question.liars,
        question.split,
        ground.owners,
        question.seeds,
        activation_bytes(manifest),
        tuple(rows),
    )


def _recipes(question: BenchConfig, manifest: Manifest) -> dict[str, Recipe]:
    """Return the recipes of the requested methods. Raises UserError for an unknown method or option."""
    known = recipes(manifest.sync)
    unknown = [name for name in question.methods if name not in known]
    if unknown:
        raise UserError(f"no method is called {unknown[0]}; there are {', '.join(known)}")
    if question.tokens is not None and question.microbatches is not None:
        raise UserError("--tokens and --microbatches both say how long a trial is: leave one of them out")
    if question.away >= question.peers:
        raise UserError(f"--away {question.away}: one of {question.peers} peers must stay")
    return {name: known[name] for name in question.methods or known}


def _kept(
    question: BenchConfig, shared: partial[Trial], known: Mapping[str, Recipe], play: Play
) -> Callable[[str, Rates, int], Future[Outcome]]:
    """Return the function that starts a trial, or reads its outcome from the folder `out` if it is there.

    The outcome of a new trial is written to the folder. `shared` has what all trials have in common.
    """
    kept = StoredTrials(question.out / "trials.jsonl")

    def begin(name: str, rates: Rates, seed: int) -> Future[Outcome]:
        local_steps = question.local_steps if known[name].local_steps else 0
        trial = shared(method=name, rate=rates.rate, outer_lr=rates.outer, seed=seed, local_steps=local_steps)
        outcome: Future[Outcome] = Future()
        if found := kept.find(trial):
            outcome.set_result(found)
        else:
            play(trial).add_done_callback(partial(over, outcome))
        return outcome

    def over(outcome: Future[Outcome], played: Future[Outcome]) -> None:
        """Store the outcome before waiters see it, because they may request the same trial next."""
        if played.cancelled():
            return
        if error := played.exception():
            outcome.set_exception(error)
        else:
            kept.keep(played.result())
            outcome.set_result(played.result())

    return begin


def _row(name: str, recipe: Recipe, question: BenchConfig, found: SearchResult) -> MethodRow:
    local_steps = recipe.local_steps and (question.local_steps or recipe.local_steps)
    return row(name, recipe.told, local_steps, found.rates_tried, found.outcomes)
