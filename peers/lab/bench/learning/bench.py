"""The whole comparison of a run: a rate for each method, every seed at that rate, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from peers.compute.stage_part import CPU, computing_of
from peers.config.compute_file import ComputeFile
from peers.data.documents import fingerprint
from peers.errors import UserError
from peers.lab.bench.learning.played import Play, Said, TrialSubject, player
from peers.lab.bench.learning.recipes import Recipe, recipes
from peers.lab.bench.learning.report import LearningReport, MethodRow, activation_bytes, row
from peers.lab.bench.learning.search import SearchResult, carried_out, plan
from peers.lab.bench.learning.trials import Outcome, Rates, StoredTrials, TrialSettings
from swarmnet.run.manifest import Manifest

TOKENS_PER_PARAMETER = 20
"""What a model of its size is trained with for the least compute (arXiv:2203.15556)."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What is asked of the bench."""

    run_file: Path
    methods: Sequence[str]
    """Empty: all."""
    tokens: int | None
    """Of all peers together; None: TOKENS_PER_PARAMETER."""
    seeds: int
    peers: int
    delay: int
    out: Path
    eval_text: Path | None = None
    tokenizer: Path | None = None
    away: int = 0
    late: float = 0.0
    rate: float | None = None
    """None: each method's is searched for."""
    local_steps: int = 0
    """Of a round; 0: as each method has it."""
    device: torch.device = CPU
    """On a GPU in bfloat16 where that has it, as a peer."""
    jobs: int = 1
    """Trials at a time. What is played, and what comes of it, does not depend on it."""


def bench(question: BenchConfig, said: Said) -> LearningReport:
    """Play what is not kept in the folder `out`, and put everything together. Raises UserError, TextError."""
    subject = TrialSubject(question.run_file, question.eval_text, question.tokenizer, question.device)
    known = _recipes(question, subject.manifest())
    ground = subject.ground(0)
    manifest, computed = ground.manifest, computing_of(ComputeFile(), question.device).dtype
    tokens_of_a_step = question.peers * manifest.microbatch_tokens
    steps = max(1, (question.tokens or TOKENS_PER_PARAMETER * ground.count) // tokens_of_a_step)
    terms = TrialSettings(
        manifest.run_id(), fingerprint(subject.texts().held_out.scored), question.peers, steps,
        question.delay, question.away, question.late, question.local_steps,
        "" if question.device.type == "cpu" else f"{computed} {question.device.type}",
    )  # fmt: skip
    question.out.mkdir(parents=True, exist_ok=True)
    plans = {}
    for name, recipe in known.items():
        begin_rate = recipe.begin_rate if question.rate is None else question.rate
        begin = Rates(begin_rate, recipe.begin_outer)
        plans[name] = plan(begin, question.seeds, searches=question.rate is None)
    with player(subject, question.jobs, said) as play:
        found = carried_out(plans, question.jobs, _kept(question, terms, known, play))
    rows = [_row(name, known[name], question, found[name]) for name in known]
    return LearningReport(
        manifest.name, ground.count, rows[0].outcomes[0].tokens, question.peers, question.delay,
        question.away, question.late, question.seeds, activation_bytes(manifest), tuple(rows),
    )  # fmt: skip


def _recipes(question: BenchConfig, manifest: Manifest) -> dict[str, Recipe]:
    """Those that are asked for. Raises UserError."""
    if manifest.init_checkpoint.path or manifest.sync.trainable:
        raise UserError(
            f"{question.run_file}: methods are compared where all is trained, from a seed; leave start and "
            "sync.trainable out of the file"
        )
    known = recipes(manifest.sync)
    unknown = [name for name in question.methods if name not in known]
    if unknown:
        raise UserError(f"no method is called {unknown[0]}; there are {', '.join(known)}")
    if question.away >= question.peers:
        raise UserError(f"--away {question.away}: of {question.peers} peers somebody must stay")
    return {name: known[name] for name in question.methods or known}


def _kept(
    question: BenchConfig, terms: TrialSettings, known: Mapping[str, Recipe], play: Play
) -> Callable[[str, Rates, int], Future[Outcome]]:
    """What begins a trial, or has its outcome from the folder `out`; it is kept there once it is over."""
    kept = StoredTrials(question.out / "trials.jsonl")

    def begin(name: str, rates: Rates, seed: int) -> Future[Outcome]:
        trial = terms.trial(name, known[name], rates, seed)
        outcome: Future[Outcome] = Future()
        if found := kept.find(trial):
            outcome.set_result(found)
        else:
            play(trial).add_done_callback(partial(over, outcome))
        return outcome

    def over(outcome: Future[Outcome], played: Future[Outcome]) -> None:
        """Kept first: whoever waits may ask for the same trial next."""
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
