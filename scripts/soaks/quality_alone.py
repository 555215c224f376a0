"""In one process: what a way of skipping stages costs the model, without a network and without chance.

    scripts/soak quality-alone [--tokens 500000] [--seeds 2] [--sequences 2] [--report FILE] RULE...

RULE is `whole` (nothing is left out) or `skip`, with what else is to be tried after colons:

    skip:first=0.25      the first quarter of the microbatches leaves nothing out
    (paths.full_path_warmup_rounds) skip:last=0.25       the last quarter
    skip:share=0.5       half of those between, drawn by chance
    skip:ramp=0.5        fewer and fewer, none any more after half
    ...:plain            whole paths are trained without Rules.branch_scale

The model, text and rounds are those of `scripts/soak quality`; stages are the real ones, called one after
the other, four microbatches a round (one with `--sequences 8`), and legal paths are drawn uniformly. A rule
and a seed always give the same model, but another rounding anywhere gives one that is 1 to 2 % better or
worse after half a million tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from quality_soak import RUN, SKIP_RATIO, STAGES, quality
from swarm import tokens_of

from peers.compute.stage_part import build_stage_part
from peers.data.documents import held_out_text
from peers.state.checkpoint_file import Model
from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.sampling import window_starts, windows
from swarmnet.model.stage_compute import copied
from swarmnet.optimizer.step import add_step
from swarmnet.run.manifest import Manifest
from swarmnet.run.path_rules import PathRules
from swarmnet.run.schema import Data, ModelShape, Paths, Rounds, Sync

ORIGIN = PeerId("alone")
SAME_TEXT = RunId("of all rules")
"""Which text a microbatch holds follows from a run's id, and rules make runs of different ids."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a run skips. Shares are of the run's microbatches."""

    name: str
    skips: bool = True
    first: float = 0.0
    last: float = 0.0
    share: float = 0.0
    ramp: float = 0.0
    plain: bool = False

    @classmethod
    def parse(cls, text: str) -> Rule:
        name, *parts = text.split(":")
        if name not in ("whole", "skip"):
            raise argparse.ArgumentTypeError(f"{text}: a rule begins with whole or skip")
        rule = cls(text, skips=name == "skip")
        for part in parts:
            key, _, value = part.partition("=")
            if key == "plain":
                rule = replace(rule, plain=True)
            elif key in ("first", "last", "share", "ramp"):
                rule = replace(rule, **{key: float(value)})
            else:
                raise argparse.ArgumentTypeError(f"{text}: there is no {key}")
        return rule

    def whole(self, passed: float, chance: float) -> bool:
        """Whether a microbatch leaves nothing out after this share of the run, by a number below 1."""
        if not self.skips or passed < self.first or passed >= 1.0 - self.last:
            return True
        return chance < (max(0.0, 1.0 - passed / self.ramp) if self.ramp else self.share)


class Stage:
    """One stage that closes a round whenever it has the tokens for one."""

    def __init__(self, manifest: Manifest, stage: int) -> None:
        self.part = build_stage_part(manifest, stage)
        self.peer = PeerId(f"stage-{stage}")
        self.target = manifest.rounds.global_batch_tokens
        self.units = self.part.first_units()
        self.round = self.tokens = self.visits = 0
        self.part.compute.publish(copied(to_floats(self.units)))

    def visited(self, tokens: int) -> None:
        self.visits += 1
        self.tokens += tokens
        if self.tokens < self.target:
            return
        compute, method = self.part.compute, self.part.method
        payload = method.contribute(compute.use_gradient(torch.clone), self.tokens, self.round, self.peer)
        tally = method.tally(self.round)
        tally.add(self.peer, payload)
        add_step(self.units, tally.step(), self.part.layout)
        self.round, self.tokens = self.round + 1, 0
        compute.publish(copied(to_floats(self.units)))

    def weights(self) -> dict[str, torch.Tensor]:
        flat = to_floats(self.units)
        return {
            entry.name: flat[entry.offset : entry.offset + entry.size].view(entry.shape)
            for entry in self.part.layout.entries
        }


def manifest_of(rule: Rule, seed: int, tokens: int) -> Manifest:
    return Manifest(
        "alone", ORIGIN, seed, STAGES,
        model=ModelShape(**RUN["model"]), data=Data(**RUN["data"]), rounds=Rounds(**RUN["rounds"]),
        paths=Paths(SKIP_RATIO if rule.skips else 0.0),
        sync=Sync(decay_rounds=tokens // RUN["rounds"]["global_batch_tokens"]),
    )  # fmt: skip


def visits(rules: PathRules) -> list[tuple[int, ...]]:
    """The shortest legal paths."""
    middle = itertools.combinations(range(1, rules.last), rules.shortest - 2)
    return [(0, *stages, rules.last) for stages in middle]


def pass_through(
    stages: Sequence[Stage], path: Sequence[int], scales: Sequence[float], key: MicrobatchId,
    inputs_BT: torch.Tensor, labels_BT: torch.Tensor,
) -> None:  # fmt: skip
    """One microbatch, forward and back."""
    passed = inputs_BT
    for stage, scale in zip(path[:-1], scales, strict=False):
        passed = stages[stage].part.compute.forward(key, passed, scale)
    gradient = stages[path[-1]].part.compute.finish(key, passed, labels_BT).hidden_gradient
    for stage in reversed(path[:-1]):
        assert gradient is not None
        gradient = stages[stage].part.compute.backward(key, gradient)
    for stage in path:
        stages[stage].visited(labels_BT.numel())


def train(rule: Rule, seed: int, tokens: int) -> dict[str, Any]:
    """A whole run, and its quality."""
    manifest = manifest_of(rule, seed, tokens)
    data, rules, chance = manifest.data, manifest.path_rules(), Random(seed)
    text = tokens_of([source.path for source in data.sources], manifest.model.vocab_size)
    stages = [Stage(manifest, stage) for stage in range(len(STAGES))]
    shortest, longest = visits(rules), tuple(range(rules.stages))
    microbatches, began = tokens // manifest.microbatch_tokens, time.monotonic()
    for number in range(microbatches):
        drawn, picked = chance.random(), chance.choice(shortest)
        path = longest if rule.whole(number / microbatches, drawn) else picked
        scales = [1.0 if rule.plain else rules.branch_scale(stage, len(path)) for stage in path]
        key = MicrobatchId(ORIGIN, number)
        starts = window_starts(SAME_TEXT, seed, key, len(text), data.micro_batch_size, data.seq_len)
        pass_through(stages, path, scales, key, *windows(text, starts, data.seq_len))
    model = Model(manifest, tuple(stage.weights() for stage in stages), min(s.round for s in stages))
    return {
        "rule": rule.name, "seed": seed, "tokens": tokens, "visits": [stage.visits for stage in stages],
        "seconds": round(time.monotonic() - began), **quality(model, held_out_text()),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rules", type=Rule.parse, nargs="+", metavar="RULE")
    parser.add_argument("--tokens", type=int, default=500_000, help="of each run")
    parser.add_argument(
        "--seeds", type=int, default=2, help="runs of each rule, from first weights of their own"
    )
    parser.add_argument("--sequences", type=int, help="of 64 tokens, in a microbatch; a round has 8")
    parser.add_argument("--report", type=Path, help="where to write all figures, a line of JSON per run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.sequences:
        RUN["data"]["micro_batch_size"] = options.sequences
    names = ("perplexity", "half gone", "worst", "all gone", "seconds")
    print(f"{'rule':32} seed " + " ".join(f"{name:>10}" for name in names))
    for seed, rule in itertools.product(range(options.seeds), options.rules):
        found = train(rule, seed, options.tokens)
        figures = [found["whole"]["perplexity"], found["half_gone_mean"], found["half_gone_worst"]]
        figures += [found["all_gone"], found["seconds"]]
        print(f"{rule.name:32} {seed:4} " + " ".join(f"{figure:10.6g}" for figure in figures), flush=True)
        if options.report:
            with options.report.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
