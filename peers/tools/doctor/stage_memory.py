"""Check whether a run's stages fit into memory, by the estimate with which a peer refuses one."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from peers.compute.memory_budget import all_needs
from peers.data.local_text import text_line
from peers.data.tokens import ShardTokens
from peers.tools.doctor.line import CheckResult, gibibytes
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.run.manifest import Manifest

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Memory:
    """Free bytes of memory; `gpu_bytes` is None if the CPU computes the stage."""

    bytes: int
    gpu_bytes: int | None = None
    limit: int | None = None
    """Memory limit of the peer file for the computing device, as in peers/compute/memory_budget.py."""


def judge(
    manifest: Manifest, wish: int | None, free: Memory, text_bytes: int, computing: Computing = PLAIN
) -> CheckResult:
    """Return whether the stages fit. `wish`: the stage of the peer file; None: the swarm chooses.
    `text_bytes`: maximum bytes of text."""
    stages = range(len(manifest.stages)) if wish is None else [wish]
    if wish is not None and wish >= len(manifest.stages):
        text = (
            f"stage {wish} is not one of the run's {len(manifest.stages)} (0 to {len(manifest.stages) - 1})"
        )
        return CheckResult("stage", "fail", text, "stage: auto in the peer file")
    every = all_needs(manifest, CPU if free.gpu_bytes is None else GPU, text_bytes, computing)
    needs = {stage: every[stage].least for stage in stages}
    fitting = [stage for stage, need in needs.items() if _fits(manifest, stage, need, free, text_bytes)]
    largest = max(needs.values())
    where = gibibytes(free.bytes) + (f" and {gibibytes(free.gpu_bytes)} on the GPU" if free.gpu_bytes else "")
    where += f" (limits.memory: {gibibytes(free.limit)})" if free.limit is not None else ""
    data = {
        "needed_bytes": list(needs.values()),
        "stages": list(stages),
        "free_bytes": free.bytes,
        "free_gpu_bytes": free.gpu_bytes,
    }
    what = f"stage {wish} needs" if wish is not None else f"{len(needs)} stages need up to"
    text = f"{what} about {gibibytes(largest)} in {computing.dtype}, there are {where}"
    if len(fitting) == len(needs):
        return CheckResult("stage", "ok", text, data=data)
    if not fitting:
        fix = "free memory, or use a larger machine"
        if computing.activation_checkpointing != "layer":
            fix += (
                "; compute: {activation_checkpointing: layer} in the peer file takes less of each microbatch"
            )
        return CheckResult("stage", "fail", f"{text}: too little for any", fix, data)
    fix = f"stage: {min(fitting, key=needs.__getitem__)} in the peer file"
    return CheckResult("stage", "warn", f"{text}: only {', '.join(map(str, fitting))} fit", fix, data)


def judge_text(wish: int | None, missing: str) -> CheckResult:
    """Return the result of the check `text` if the text is not read. `missing`: the missing text, and how to
    name its place; empty: nothing is missing."""
    if not missing:
        return CheckResult("text", "ok", "is not read: only the first stage reads it")
    what, _, fix = missing.partition("; ")
    if wish is None:
        return CheckResult("text", "warn", f"{what}: serves any stage but the first", fix)
    if wish > 0:
        return CheckResult("text", "ok", f"{what}, and only the first stage reads it")
    return CheckResult("text", "fail", f"{what}, and the first stage reads it", fix)


def judge_read(read: ShardTokens, window: int, shards: int = 1) -> CheckResult:
    """Return whether a peer could serve the first stage with its text. `read`: tokens of the first of
    `shards` shards; `window`: tokens of a sequence."""
    text, warnings = text_line(read, shards), read.reading.warnings()
    data = {**asdict(read.reading), "tokens": len(read.tokens)}
    if len(read.tokens) < window:
        short = f"{text}: a sequence takes {window:,}{read.reading.reason()}"
        return CheckResult("text", "fail", short, "add text", data)
    if warnings:
        return CheckResult(
            "text", "warn", "; ".join([text, *warnings]), "correct or remove what the message names", data
        )
    return CheckResult("text", "ok", text, data=data)


def _fits(manifest: Manifest, stage: int, need: int, free: Memory, text_bytes: int) -> bool:
    if free.limit is not None and need > free.limit:
        return False
    if free.gpu_bytes is None:
        return need <= free.bytes
    beside = all_needs(manifest, CPU, text_bytes)[stage].process
    return need <= free.gpu_bytes and beside <= free.bytes
