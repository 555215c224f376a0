"""Decide whether a stage fits into the memory that a peer may use, before anything is fetched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from peers.compute.process_memory import memory_bytes
from peers.config.errors import UserError
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.resources.memory_estimate import DAEMON_BYTES, PROCESS_BYTES, Needs, needs_of, spread_over
from swarmnet.run.manifest import Manifest

TOKENIZING_BYTES = 130_000_000
"""Additional memory of the tokenizers package. A process that tokenized 57 MB of text, with a vocabulary of
8,192, was 131 MiB larger at its peak than before."""


def all_needs(
    manifest: Manifest,
    device: torch.device,
    text_bytes: int,
    computing: Computing = PLAIN,
    devices: int = 1,
    remote_devices: int = 0,
) -> list[Needs]:
    """Return the memory that each stage needs on this device, or on each of `devices` GPUs;
    `remote_devices` of other machines have their part of it. On a CPU this includes the programs and, in
    stage 0, the training text of `text_bytes`. With a GPU both are in host memory and not counted."""
    uses_host_memory = device.type == "cpu"
    process_bytes = PROCESS_BYTES + DAEMON_BYTES if uses_host_memory else 0
    if manifest.data.tokenizer != "bytes":
        text_bytes += TOKENIZING_BYTES
    stage_needs = []
    for stage in range(len(manifest.stages)):
        extra_bytes = process_bytes + (text_bytes if stage == 0 and uses_host_memory else 0)
        stage_needs.append(needs_of(manifest, stage, extra_bytes, computing))
    if devices + remote_devices == 1:
        return stage_needs
    return [spread_over(needs, manifest, devices, computing, remote_devices) for needs in stage_needs]


def allowed_bytes(limit: int | None, device: torch.device) -> int:
    """Return the bytes that a peer may use of the memory in which `device` computes."""
    total = memory_bytes(device)
    return total if limit is None else min(limit, total)


def graphs_that_fit(every: Sequence[Needs], stage: int, allowed: int, limited: bool) -> int:
    """Return how many microbatches may have an autograd graph in this stage at once, within `allowed` bytes.
    `every` has the needs of each stage; `limited` means that the peer file sets the limit. Raises UserError,
    with what to try, if not even one fits."""
    stage_needs = every[stage]
    graphs = stage_needs.graphs_within(allowed)
    if graphs >= 1:
        return graphs
    fitting = [needs for needs in every if needs.least <= allowed]
    advice = []
    if fitting:
        other = fitting[0]
        advice.append(f"stage {other.stage} (needs {gib(other.least)}): `--stage {other.stage}`")
    advice.append("a larger limits.memory in the peer file" if limited else "a machine with more memory")
    whose = "limits.memory allows" if limited else "this machine has"
    raise UserError(
        f"stage {stage} needs {gib(stage_needs.least)}, {whose} {gib(allowed)}; try {', or '.join(advice)}"
    )


def gib(count: int) -> str:
    """Format bytes, as in `7.6 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
