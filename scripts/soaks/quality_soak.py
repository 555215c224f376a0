"""Real processes: what a model loses with half of its middle stages gone, trained with and without skipping.

    scripts/soak quality [--tokens 500000] [--seeds 3] [--keep FOLDER] [--report FILE]

Two runs that differ in nothing but `paths` (no skipping; 1/3, by every fourth microbatch after a first
quarter that skips nothing) train on 127.0.0.1 for the same number of tokens, beside each other. Then their
checkpoints are scored on held-out text: whole, and with every choice of half of the middle stages left out,
which is what inference does with stages that nobody holds (hidden states go by). Last, the skipping run is
started again without the peers of two middle stages and scored through the live peers that are left, as
`swarmnet evaluate --run` does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from model_sizes import model_keys
from processes import publish_run
from torch import Tensor

from peers.data.documents import held_out_text
from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.local_processes import DemoPeer, start
from peers.state.checkpoint_file import Model, newest
from peers.telemetry import event_log
from peers.tools.model.evaluate import Score, bits_per_byte
from swarmnet.model.decoder import forward

STAGES = (2, 1, 1, 1, 1, 2)
"""Layers. The first and the last stage are never left out (docs/decisions/0007-skipping.md)."""
RUN: dict[str, Any] = {
    "name": "quality",
    "stages": list(STAGES),
    "model": model_keys(width=64, layers=sum(STAGES), heads=4, kv_heads=4, inner=192),
    "data": {"seq_len": 64, "micro_batch_size": 2},
    "rounds": {"global_batch_tokens": 512},
}
"""Small rounds: with 2048 tokens each, half a million are 244 steps, and by then the model has hardly begun
to use its depth. Four microbatches in each, so that whole and short paths meet in one step, as they do in a
round of a real swarm (docs/benchmarks/quality.md)."""
IN_FLIGHT = 1
"""Microbatches of an origin under way: gradients are of the weights of their own round. Those of the
weights a round ago cost 10 to 17 % of perplexity, and equal runs scatter by 6 %, which hides the 2 % that
are looked for."""
SKIP_RATIO = 1 / 3
WHOLE_FIRST, WHOLE_SHARE = 1 / 4, 0.75
"""Of the rounds, at the beginning, and of the microbatches after them (docs/benchmarks/quality.md)."""
MIDDLE = range(1, len(STAGES) - 1)
GONE = len(MIDDLE) // 2
MAX_LOSS, MAX_COST = 1.07, 1.02
"""Times the perplexity: with half of the middle gone, and of the whole model for having skipped (issue 4)."""
SCORED_BYTES = 32 * 1024
TOLD_TOKENS = 100_000
"""How often a run says how far it is."""
SILENT_SECONDS = 300.0
"""Without one microbatch more, a run is given up."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the two runs."""

    name: str
    skip_ratio: float
    first: float = 0.0
    """Share of the rounds, at the beginning, in which nothing is left out ..."""
    share: float = 0.0
    """... and of the microbatches after them (docs/decisions/0016-whole-first.md)."""


ARMS = (Arm("whole", 0.0), Arm("skipping", SKIP_RATIO, WHOLE_FIRST, WHOLE_SHARE))


class Swarm:
    """The processes of one run, in a folder of its own."""

    def __init__(self, folder: Path, arm: Arm, tokens: int, each: int, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.arm = arm
        self.tokens = tokens
        self.each = each
        self.seed = seed
        self.peers: dict[str, DemoPeer] = {}
        self.boot: DemoPeer | None = None

    def publish(self) -> None:
        # Both decay over the same tokens; a round is so many of them.
        rounds = self.tokens // RUN["rounds"]["global_batch_tokens"]
        run = {**RUN, "seed": self.seed, "sync": {"decay_rounds": rounds}}
        run["paths"] = {
            "skip_ratio": self.arm.skip_ratio, "full_path_warmup_rounds": int(rounds * self.arm.first),
            "full_path_fraction": self.arm.share,
        }  # fmt: skip
        publish_run(self.folder, run)

    async def begin(self, without: Collection[int] = ()) -> None:
        self.boot = await start(self.folder, "boot", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
        await self.boot.until_listening()
        for stage, number in itertools.product(range(len(STAGES)), range(self.each)):
            if stage not in without:
                keys = {"run": "run.json", "bootstrap": self.boot.addresses, "stage": stage, **LOOPBACK}
                keys |= {"in_flight": IN_FLIGHT, "drain_seconds": 60.0}
                name = f"stage-{stage}-{number}"
                self.peers[name] = await start(self.folder, name, keys)

    async def trained(self) -> None:
        """Wait until the origins have committed all tokens. AssertionError if nothing happens any more."""
        done, moved_at = 0, time.monotonic()
        while done < self.tokens:
            await asyncio.sleep(1.0)
            now, before = sum(peer.status.get("tokens", 0) for peer in self.origins()), done
            if now > before:
                done, moved_at = now, time.monotonic()
                if done // TOLD_TOKENS > before // TOLD_TOKENS:
                    print(f"{self.arm.name}: {done:,} of {self.tokens:,} tokens", file=sys.stderr)
            dead = [name for name, peer in self.peers.items() if not peer.alive]
            assert not dead, f"{dead} ended: {[list(self.peers[name].said)[-3:] for name in dead]}"
            assert time.monotonic() < moved_at + SILENT_SECONDS, f"nothing for {SILENT_SECONDS:g} s"

    def origins(self) -> list[DemoPeer]:
        return [peer for name, peer in self.peers.items() if name.startswith("stage-0-")]

    async def end(self) -> None:
        # Origins first: their last microbatches need the others, who would be waited for until they give up.
        await asyncio.gather(*(peer.stop(90.0) for peer in self.origins()))
        await asyncio.gather(*(peer.stop(90.0) for peer in self.peers.values()))
        if self.boot is not None:
            await self.boot.stop(5.0)
        self.peers.clear()

    def committed(self, stage: int) -> dict[str, int]:
        """Tokens by peer of a stage."""
        return {
            folder.name: sum(event.fields["tokens"] for event in self.events(folder, "committed"))
            for folder in self.folder.glob(f"stage-{stage}-*/")
        }

    def events(self, folder: Path, name: str) -> list[event_log.LogLine]:
        log = folder / "events.jsonl"
        return [event for event in event_log.read(log) if event.name == name] if log.exists() else []

    def counts(self) -> list[dict[str, Any]]:
        """What every stage saw and did."""
        return [
            {
                "tokens": self.committed(stage),
                "rounds": max(
                    (event.fields["round"] + 1 for folder in self.folder.glob(f"stage-{stage}-*/")
                     for event in self.events(folder, "settled")), default=0,
                ),
            }
            for stage in range(len(STAGES))
        ]  # fmt: skip

    async def live(self, text: bytes) -> dict[str, Any]:
        """The score that the live peers give, as `swarmnet evaluate --run` asks them."""
        from peers.network.discovery.bootstrap import PeerCache
        from peers.tools.model.swarm_client import Conversation
        from peers.tools.model.swarm_session import score, visiting

        assert self.boot is not None
        talk, cache = Conversation(), PeerCache(self.folder / "visitor.json")
        run = str(self.folder / "run.json")
        async with visiting(run, self.boot.addresses, cache, lambda *_: None) as client:
            found = await score(client, text, limit=SCORED_BYTES // 4, conversation=talk)
        return {**told(found), "left_out": dict(talk.left_out), "requests": talk.requests}


def scored(model: Model, text: bytes, gone: Collection[int], limit: int = SCORED_BYTES) -> Score:
    """The model from its checkpoints, with the stages in `gone` left out."""
    manifest, path = model.manifest, model.path(gone)
    visited = [stage for stage in range(len(STAGES)) if stage not in gone]

    def logits_of(tokens_BT: Tensor) -> Tensor:
        passed = tokens_BT
        for stage, weights in zip(visited, path, strict=True):
            passed = forward(weights, manifest.model, manifest.span(stage), passed)
        return passed

    return bits_per_byte(logits_of, text, window=manifest.data.seq_len, limit=limit)


def told(score: Score) -> dict[str, float]:
    return {"bits_per_byte": round(score.bits_per_byte, 4), "perplexity": round(score.perplexity, 4)}


def quality(model: Model, text: bytes) -> dict[str, Any]:
    """Whole, and without each choice of half of the middle stages; also without each single one, and all."""
    whole = scored(model, text, ())

    def loss(gone: Collection[int]) -> float:
        return scored(model, text, gone).perplexity / whole.perplexity

    half = {" ".join(map(str, gone)): loss(gone) for gone in itertools.combinations(MIDDLE, GONE)}
    return {
        "round": model.round, "whole": told(whole), "text_sha256": whole.sha256,
        "half_gone": {gone: round(ratio, 4) for gone, ratio in half.items()},
        "half_gone_mean": round(exp(fmean(map(log, half.values()))), 4),
        "half_gone_worst": round(max(half.values()), 4),
        "one_gone": {stage: round(loss((stage,)), 4) for stage in MIDDLE},
        "all_gone": round(loss(MIDDLE), 4),
    }  # fmt: skip


async def train(folder: Path, arm: Arm, tokens: int, each: int, seed: int) -> dict[str, Any]:
    """One run from beginning to end, unless that is done; what its peers did, and its quality."""
    kept = folder / "found.json"
    if kept.exists():
        return cast("dict[str, Any]", json.loads(kept.read_text()))
    swarm = Swarm(folder, arm, tokens, each, seed)
    swarm.publish()
    began = time.monotonic()
    try:
        await swarm.begin()
        await swarm.trained()
    finally:
        await swarm.end()
    seconds = time.monotonic() - began
    text = held_out_text()
    rated = await asyncio.to_thread(quality, newest(folder), text)
    found = {"seconds": round(seconds), "stages": swarm.counts(), **rated}
    if arm.skip_ratio > 0:
        gone = tuple(MIDDLE)[:GONE]
        resting = await asyncio.to_thread(scored, newest(folder), text, gone, SCORED_BYTES // 4)
        try:
            await swarm.begin(without=gone)
            found["live"] = {"gone": list(gone), "checkpoints": told(resting), **await swarm.live(text)}
        finally:
            await swarm.end()
    kept.write_text(json.dumps(found))
    return found


async def train_pair(folder: Path, tokens: int, each: int, seed: int) -> dict[str, dict[str, Any]]:
    """Both runs, beside each other: waiting for one's messages leaves its cores to the other."""
    async with asyncio.TaskGroup() as group:
        runs = {
            arm.name: group.create_task(train(folder / arm.name, arm, tokens, each, seed)) for arm in ARMS
        }
    return {name: run.result() for name, run in runs.items()}


def told_pair(seed: int, found: dict[str, dict[str, Any]]) -> str:
    """Both runs of a seed, one line each."""
    return "\n".join(
        f"{seed:4} {name:9} {arm['whole']['bits_per_byte']:9.4f} {arm['whole']['perplexity']:10.4f} "
        f"{arm['half_gone_mean']:9.4f} {arm['half_gone_worst']:8.4f} {arm['all_gone']:8.4f} "
        f"{arm['seconds']:7}"
        for name, arm in found.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=500_000, help="of each run")
    parser.add_argument(
        "--seeds", type=int, default=3, help="pairs of runs, each from first weights of its own"
    )
    parser.add_argument("--each", type=int, default=1, help="peers per stage")
    parser.add_argument("--keep", type=Path, help="folder for the peers' states, kept; finished runs stay")
    parser.add_argument("--report", type=Path, help="where to write all figures as JSON")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="swarmnet-quality-"))
    pairs = [
        asyncio.run(train_pair(folder / f"seed-{seed}", options.tokens, options.each, seed))
        for seed in range(options.seeds)
    ]
    costs = [pair["skipping"]["whole"]["perplexity"] / pair["whole"]["whole"]["perplexity"] for pair in pairs]
    cost = exp(fmean(map(log, costs)))
    loss = exp(fmean(log(pair["skipping"]["half_gone_mean"]) for pair in pairs))
    report = {
        "run": RUN, "tokens": options.tokens, "each": options.each, "pairs": pairs,
        "costs": [round(ratio, 4) for ratio in costs], "cost": round(cost, 4), "half_gone": round(loss, 4),
    }  # fmt: skip
    if options.report:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    print("seed run       bits/byte perplexity half gone    worst all gone seconds")
    for seed, pair in enumerate(pairs):
        print(told_pair(seed, pair))
    for seed, (pair, ratio) in enumerate(zip(pairs, costs, strict=True)):
        print(
            f"seed {seed}: skipping costs the whole model {ratio - 1:+.2%}; live {pair['skipping']['live']}"
        )
    print(
        f"mean cost {cost - 1:+.2%} (at most {MAX_COST - 1:.0%}), half gone {loss:.4f} (at most {MAX_LOSS})"
    )
    print(f"states and checkpoints are in {folder}")
    return 0 if cost <= MAX_COST and loss <= MAX_LOSS else 1


if __name__ == "__main__":
    raise SystemExit(main())
