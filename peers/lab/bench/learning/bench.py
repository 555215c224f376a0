"""The whole comparison of a run: a rate for each method, every seed at that rate, and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from peers.compute.stage_part import CPU, computing_of
from peers.config.compute_file import ComputeFile
from peers.config.run_file import load_manifest, require_own_experts
from peers.data.documents import fingerprint
from peers.errors import UserError
from peers.lab.bench.learning.ground import Ground, read_texts
from peers.lab.bench.learning.recipes import recipes
from peers.lab.bench.learning.report import Report, activation_bytes, row
from peers.lab.bench.learning.trials import Bench, Kept, Rates, Trial
from swarmnet.identifiers import PeerId

TOKENS_PER_PARAMETER = 20
"""What a model of its size is trained with for the least compute (arXiv:2203.15556)."""


@dataclass(frozen=True, slots=True)
class Question:
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
    own_steps: int = 0
    """Of a round; 0: as each method has it."""
    device: torch.device = CPU
    """On a GPU in bfloat16 where that has it, as a peer."""


def bench(question: Question, said: Callable[[Trial, int], None]) -> Report:
    """Play what is not kept in the folder `out`, and put everything together. Raises UserError, TextError."""
    manifest = load_manifest(question.run_file, PeerId(""), {})
    require_own_experts(manifest, "bench learning")
    if manifest.start.path or manifest.sync.trainable:
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
    texts = read_texts(question.run_file, manifest, question.eval_text, question.tokenizer)
    torch.set_num_threads(1)
    computing = computing_of(ComputeFile(), question.device)
    ground_of = cache(lambda seed: Ground(manifest, texts, seed, computing, question.device))
    count = ground_of(0).count
    tokens_of_a_step = question.peers * manifest.microbatch_tokens
    steps = max(1, (question.tokens or TOKENS_PER_PARAMETER * count) // tokens_of_a_step)
    question.out.mkdir(parents=True, exist_ok=True)
    trials = Bench(
        ground_of, Kept(question.out / "trials.jsonl"), manifest.run_id(),
        fingerprint(texts.held_out.scored), question.peers, steps, question.delay, said, question.away,
        question.late, question.own_steps,
        "" if question.device.type == "cpu" else f"{computing.dtype} {question.device.type}",
    )  # fmt: skip
    rows = []
    for name in question.methods or known:
        recipe = known[name]
        if question.rate is None:
            rates, tried = trials.best_rates(name, recipe)
        else:
            rates, tried = Rates(question.rate, recipe.begin_outer), 1
        outcomes = [trials.played(name, recipe, rates, seed) for seed in range(question.seeds)]
        own_steps = recipe.own_steps and (question.own_steps or recipe.own_steps)
        rows.append(row(name, recipe.told, own_steps, tried, outcomes))
    return Report(
        manifest.name, count, rows[0].outcomes[0].tokens, question.peers, question.delay, question.away,
        question.late, question.seeds, activation_bytes(manifest), tuple(rows),
    )  # fmt: skip
