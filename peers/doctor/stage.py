"""Whether a run's stages fit into this machine's memory, by the estimate by which a peer refuses one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peers.doctor.line import Line, gibibytes
from peers.fitting import all_needs
from swarmnet.manifest import Manifest

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Memory:
    """Free bytes; `gpu_bytes` None: the stage is computed on the CPU."""

    bytes: int
    gpu_bytes: int | None = None
    limit: int | None = None
    """What the peer file allows where the stage is computed, as in peers/fitting.py."""


def judge(manifest: Manifest, wish: int | None, free: Memory, text_bytes: int) -> Line:
    """`wish`: the stage of the peer file; None: the swarm chooses. `text_bytes`: what text may take."""
    stages = range(len(manifest.stages)) if wish is None else [wish]
    if wish is not None and wish >= len(manifest.stages):
        text = (
            f"stage {wish} is not one of the run's {len(manifest.stages)} (0 to {len(manifest.stages) - 1})"
        )
        return Line("stage", "fail", text, "stage: auto in the peer file")
    every = all_needs(manifest, CPU if free.gpu_bytes is None else GPU, text_bytes)
    needs = {stage: every[stage].least for stage in stages}
    fitting = [stage for stage, need in needs.items() if _fits(manifest, stage, need, free, text_bytes)]
    largest = max(needs.values())
    where = gibibytes(free.bytes) + (f" and {gibibytes(free.gpu_bytes)} on the GPU" if free.gpu_bytes else "")
    where += f" (limits.memory: {gibibytes(free.limit)})" if free.limit is not None else ""
    data = {"needed_bytes": list(needs.values()), "stages": list(stages), "free_bytes": free.bytes,
            "free_gpu_bytes": free.gpu_bytes}  # fmt: skip
    what = f"stage {wish} needs" if wish is not None else f"{len(needs)} stages need up to"
    text = f"{what} about {gibibytes(largest)}, there are {where}"
    if len(fitting) == len(needs):
        return Line("stage", "ok", text, data=data)
    if not fitting:
        return Line(
            "stage", "fail", f"{text}: too little for any", "free memory, or use a larger machine", data
        )
    fix = f"stage: {min(fitting, key=needs.__getitem__)} in the peer file"
    return Line("stage", "warn", f"{text}: only {', '.join(map(str, fitting))} fit", fix, data)


def _fits(manifest: Manifest, stage: int, need: int, free: Memory, text_bytes: int) -> bool:
    if free.limit is not None and need > free.limit:
        return False
    if free.gpu_bytes is None:
        return need <= free.bytes
    beside = all_needs(manifest, CPU, text_bytes)[stage].process
    return need <= free.gpu_bytes and beside <= free.bytes
