"""Decide whether a stage fits into the memory that a peer may use, before anything is fetched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from peers.compute.process_memory import memory_bytes
from peers.errors import UserError
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.resources.memory_estimate import DAEMON_BYTES, PROCESS_BYTES, Needs, needs_of, spread_over
from swarmnet.run.manifest import Manifest

TOKENIZING_BYTES = 130_000_000
"""Additional memory of the tokenizers package. A process that tokenized 57 MB of text, with a vocabulary of
8,192, was 131 MiB larger at its peak than before."""


def all_needs(
    manifest: Manifest, device: torch.device, text_bytes: int, computing: Computing = PLAIN, devices: int = 1
) -> list[Needs]:
    """Return the needs of every stage on this device, or on each of several GPUs. Programs and text are in
    host memory, not in the GPU's."""
    own = PROCESS_BYTES + DAEMON_BYTES if device.type == "cpu" else 0
    text = text_bytes + (0 if manifest.data.tokenizer == "bytes" else TOKENIZING_BYTES)
    every = [
        needs_of(manifest, stage, own + (text if stage == 0 and own else 0), computing)
        for stage in range(len(manifest.stages))
    ]
    if devices == 1:
        return every
    return [spread_over(needs, manifest, devices, computing) for needs in every]


def allowed_bytes(limit: int | None, device: torch.device) -> int:
    """Return the bytes that a peer may use of the memory in which `device` computes."""
    there = memory_bytes(device)
    return there if limit is None else min(limit, there)


def graphs_that_fit(every: Sequence[Needs], stage: int, allowed: int, limited: bool) -> int:
    """Return how many microbatches a peer may keep open in this stage. UserError if not even one fits.
    `limited` means that the peer file sets the limit."""
    wanted = every[stage]
    graphs = wanted.graphs_within(allowed)
    if graphs >= 1:
        return graphs
    fitting = [f"{needs.stage} (needs {gib(needs.least)})" for needs in every if needs.least <= allowed]
    tries = [f"stage {fitting[0]}: `--stage {fitting[0].partition(' ')[0]}`"] if fitting else []
    tries += ["a larger limits.memory in the peer file"] if limited else ["a machine with more memory"]
    whose = "limits.memory allows" if limited else "this machine has"
    raise UserError(
        f"stage {stage} needs {gib(wanted.least)}, {whose} {gib(allowed)}; try {', or '.join(tries)}"
    )


def gib(count: int) -> str:
    """Format bytes, as in `7.6 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
