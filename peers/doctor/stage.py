"""Whether a run's stages fit into this machine's memory."""

from __future__ import annotations

from dataclasses import dataclass

from peers.doctor.line import Line, gibibytes
from swarmnet.layout import layout_of
from swarmnet.manifest import Manifest
from swarmnet.parameters import parameter_shapes

BASE_BYTES = 1 << 29
"""A peer's process (330 MB) and its p2pd (at most 158 MB) before any weights, measured."""
BYTES_PER_PARAMETER = 48
"""Settled, live and looked-ahead weights, momentum, gradient, snapshots, what a step takes for a while. A
stage of 13 million parameters with a window of one round took 53 in all at its peak (docs/doctor.md)."""
BYTES_PER_OPEN_ROUND = 6
"""An int32 step and an int16 tally per parameter (swarmnet/replica.py, votes.py)."""
ON_GPU_PER_PARAMETER = 40
"""The same without snapshots, which lie in the machine's memory; not measured."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Free bytes; `gpu_bytes` None: the stage is computed on the CPU."""

    bytes: int
    gpu_bytes: int | None = None


def parameters(manifest: Manifest, stage: int) -> int:
    return layout_of(parameter_shapes(manifest.model, manifest.span(stage))).size


def needed(manifest: Manifest, stage: int) -> int:
    """Bytes of memory that a peer of this stage takes, activations left out: it takes only as many
    microbatches at a time as fit in an eighth of the memory."""
    each = BYTES_PER_PARAMETER + BYTES_PER_OPEN_ROUND * manifest.rounds.window
    return BASE_BYTES + each * parameters(manifest, stage)


def judge(manifest: Manifest, wish: int | None, free: Memory) -> Line:
    """`wish`: the stage of the peer file; None: the swarm chooses."""
    stages = range(len(manifest.stages)) if wish is None else [wish]
    if wish is not None and wish >= len(manifest.stages):
        text = (
            f"stage {wish} is not one of the run's {len(manifest.stages)} (0 to {len(manifest.stages) - 1})"
        )
        return Line("stage", "fail", text, "stage: auto in the peer file")
    needs = {stage: needed(manifest, stage) for stage in stages}
    fitting = [stage for stage, need in needs.items() if _fits(manifest, stage, need, free)]
    largest = max(needs.values())
    where = gibibytes(free.bytes) + (f" and {gibibytes(free.gpu_bytes)} on the GPU" if free.gpu_bytes else "")
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


def _fits(manifest: Manifest, stage: int, need: int, free: Memory) -> bool:
    if free.gpu_bytes is None:
        return need <= free.bytes
    return need <= free.bytes and ON_GPU_PER_PARAMETER * parameters(manifest, stage) <= free.gpu_bytes
