"""Whether a run's stages fit into this machine's memory."""

from __future__ import annotations

from dataclasses import dataclass

from peers.doctor.line import Line, gibibytes
from swarmnet.layout import layout_of
from swarmnet.manifest import Manifest
from swarmnet.model import parameter_shapes

BASE_BYTES = 1 << 29
"""A peer's process (330 MB) and its p2pd (at most 158 MB) before any weights, measured."""
P2PD_BYTES = 158_000_000
"""One for each further stage; as above."""
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


def needed(manifest: Manifest, stage: int, adjacent: int = 1) -> int:
    """Bytes of memory that a peer takes which holds so many adjacent stages from this one on, activations
    left out: it takes only as many microbatches at a time as fit in an eighth of the memory."""
    each = BYTES_PER_PARAMETER + BYTES_PER_OPEN_ROUND * manifest.rounds.window
    held = sum(parameters(manifest, number) for number in range(stage, stage + adjacent))
    return BASE_BYTES + (adjacent - 1) * P2PD_BYTES + each * held


def judge(manifest: Manifest, wish: int | None, free: Memory, adjacent: int = 1) -> Line:
    """`wish`: the stage of the peer file, the first of `adjacent` ones; None: the swarm chooses."""
    highest = len(manifest.stages) - adjacent
    if adjacent > 1 and (highest < 0 or (wish is not None and wish > highest)):
        text = f"the run has {len(manifest.stages)} stages, fewer than {(wish or 0) + adjacent}"
        return Line("stage", "fail", text, "a smaller stage or stages in the peer file")
    stages = range(highest + 1) if wish is None else [wish]
    if wish is not None and wish >= len(manifest.stages):
        text = (
            f"stage {wish} is not one of the run's {len(manifest.stages)} (0 to {len(manifest.stages) - 1})"
        )
        return Line("stage", "fail", text, "stage: auto in the peer file")
    needs = {stage: needed(manifest, stage, adjacent) for stage in stages}
    fitting = [stage for stage, need in needs.items() if _fits(manifest, stage, adjacent, need, free)]
    largest = max(needs.values())
    where = gibibytes(free.bytes) + (f" and {gibibytes(free.gpu_bytes)} on the GPU" if free.gpu_bytes else "")
    data = {"needed_bytes": list(needs.values()), "stages": list(stages), "free_bytes": free.bytes,
            "free_gpu_bytes": free.gpu_bytes}  # fmt: skip
    what = f"stage {wish} needs" if wish is not None else f"{len(needs)} stages need up to"
    if adjacent > 1:
        what = f"{adjacent} stages from {wish if wish is not None else 'any'} on need up to"
    text = f"{what} about {gibibytes(largest)}, there are {where}"
    if len(fitting) == len(needs):
        return Line("stage", "ok", text, data=data)
    if not fitting:
        return Line(
            "stage", "fail", f"{text}: too little for any", "free memory, or use a larger machine", data
        )
    fix = f"stage: {min(fitting, key=needs.__getitem__)} in the peer file"
    return Line("stage", "warn", f"{text}: only {', '.join(map(str, fitting))} fit", fix, data)


def _fits(manifest: Manifest, stage: int, adjacent: int, need: int, free: Memory) -> bool:
    if free.gpu_bytes is None:
        return need <= free.bytes
    held = sum(parameters(manifest, number) for number in range(stage, stage + adjacent))
    return need <= free.bytes and ON_GPU_PER_PARAMETER * held <= free.gpu_bytes
