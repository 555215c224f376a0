"""Run trials of the learning benchmark in this process, or in parallel in a pool of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from threading import Thread
from typing import TypeAlias

import torch

from peers.compute.stage_part import computing_of
from peers.config.compute_file import ComputeFile
from peers.config.errors import UserError
from peers.config.run_file import beside, load_straight_manifest
from peers.lab.bench.learning.ground import BenchTexts, Ground, read_texts
from peers.lab.bench.learning.recipes import recipes
from peers.lab.bench.learning.text_split import TextSplit
from peers.lab.bench.learning.trials import Outcome, Trial, play
from peers.lab.world.parallel import pool
from peers.state.start_folder import open_model, require_hash
from swarmnet.run.manifest import Manifest

Said: TypeAlias = Callable[[Trial, int], None]
"""Progress callback: receives a trial and its finished steps; at the end of a trial, all of its steps."""
Play: TypeAlias = Callable[[Trial], "Future[Outcome]"]
"""Starts a trial."""
TELLS = 100
"""Progress reports of a trial from a process of the pool; enough for a progress bar."""


@dataclass(frozen=True, slots=True)
class TrialSubject:
    """The run that trials use: its file, held-out text, tokenizer and device."""

    run_file: Path
    eval_text: Path | None
    tokenizer: Path | None
    device: torch.device
    split: str = ""
    """How the text is divided among owners (`text_split.py`); empty: all peers have all of it."""

    def ground(self, seed: int) -> Ground:
        """Return the model and texts for a seed. Raises UserError, TextError."""
        manifest, texts = _read(self)
        return Ground(
            manifest=manifest,
            texts=texts,
            seed=seed,
            start=self.start(manifest),
            computing=computing_of(ComputeFile(), self.device),
            device=self.device,
        )

    def start(self, manifest: Manifest) -> Path | None:
        """Return the folder of the run's initial model; None without one. Raises UserError."""
        wanted = manifest.init_checkpoint.path
        if not wanted:
            return None
        folder = beside(self.run_file.parent, wanted)
        if folder is None:
            raise UserError(f"{self.run_file}: init_checkpoint.path: {wanted} is not next to the run file")
        return folder

    def texts(self) -> BenchTexts:
        """Return the texts of the run. Raises UserError, TextError."""
        return _read(self)[1]

    def manifest(self) -> Manifest:
        """Return the manifest of the run. Raises UserError."""
        return load_straight_manifest(self.run_file)


@lru_cache(maxsize=1)  # A corpus takes 8 bytes a token, and a process runs trials of one run only.
def _read(subject: TrialSubject) -> tuple[Manifest, BenchTexts]:
    manifest = subject.manifest()
    start = subject.start(manifest)
    if start is not None:  # A trial of another model is another trial.
        sha256 = require_hash(open_model(start, manifest), manifest)
        manifest = replace(manifest, init_checkpoint=replace(manifest.init_checkpoint, sha256=sha256))
    split = TextSplit.parse(subject.split)
    if split != TextSplit() and not split.trains:  # Each peer has the text of its owner.
        manifest = replace(manifest, data=replace(manifest.data, private=True))
    return manifest, read_texts(subject.run_file, manifest, subject.eval_text, subject.tokenizer, split)


def _outcome(subject: TrialSubject, trial: Trial, report_progress: Callable[[int], None]) -> Outcome:
    torch.set_num_threads(1)
    ground = subject.ground(trial.seed)
    outcome = play(trial, recipes(ground.manifest.sync)[trial.method], ground, report_progress)
    report_progress(trial.steps)  # A trial that diverged ended before.
    return outcome


@contextmanager
def player(subject: TrialSubject, jobs: int, report_progress: Said) -> Iterator[Play]:
    """Yield the function that starts a trial. With one job the trial is finished when it returns.

    Raises UserError if a process of the pool is killed.
    """
    if jobs == 1:
        yield lambda trial: _in_this_process(subject, trial, report_progress)
        return
    queue: SimpleQueue[tuple[Trial, int] | None] = get_context("spawn").SimpleQueue()
    reporter = Thread(
        target=_report_from_queue, args=(queue, report_progress), name="trial progress", daemon=True
    )
    reporter.start()
    try:
        with pool(jobs, _set_queue, queue) as workers:
            yield lambda trial: workers.submit(_in_a_pool, subject, trial)
    except BrokenProcessPool as ended:
        raise UserError(
            f"one of {jobs} processes was killed, most likely because the machine's memory was used up; "
            "finished trials are kept: repeat the command with a smaller --jobs"
        ) from ended
    finally:
        queue.put(None)
        reporter.join()


def _in_this_process(subject: TrialSubject, trial: Trial, report_progress: Said) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(_outcome(subject, trial, lambda done: report_progress(trial, done)))
    return future


_progress: ContextVar[SimpleQueue[tuple[Trial, int] | None]] = ContextVar("progress")
"""Progress queue of a process of the pool, whose trials begin and end in one context."""


def _set_queue(queue: SimpleQueue[tuple[Trial, int] | None]) -> None:
    _progress.set(queue)


def _in_a_pool(subject: TrialSubject, trial: Trial) -> Outcome:
    every = max(1, trial.steps // TELLS)

    def report_progress(done: int) -> None:
        if done % every == 0 or done == trial.steps:
            _progress.get().put((trial, done))

    return _outcome(subject, trial, report_progress)


def _report_from_queue(queue: SimpleQueue[tuple[Trial, int] | None], report_progress: Said) -> None:
    while (report := queue.get()) is not None:
        report_progress(*report)
