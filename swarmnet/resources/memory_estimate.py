"""Estimate how much memory a stage takes, from the manifest alone, before anything is fetched.

The estimate adds up the tensors that a worker holds, such as weights, gradients and optimizer moments, in
bytes per parameter. `swarmnet bench memory` measures them (docs/benchmarks/memory.md). A `Layout` lists the
parameters of a stage; its `size` is their number, with padding. The peers of a stage agree on each round of
training: until then the round is *open*, afterwards it is *settled*. The module does no IO.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.flat_layout import Layout, frozen_layout, sizes_of, trained_layout, trained_part
from swarmnet.model.parameters import trains_with_muon
from swarmnet.optimizer.polar_factor import BATCH_NUMBERS
from swarmnet.optimizer.tiling import GPU_TIMES
from swarmnet.pipeline.flow_control import BF16_BYTES, FLOAT_BYTES, graph_at_work, graph_bytes
from swarmnet.run.local_step_config import InnerOptimizerName
from swarmnet.run.manifest import Manifest

GRID_BYTES = FLOAT_BYTES
"""Settled weights, per parameter."""
WORK_BYTES = {"fp32": FLOAT_BYTES, "bf16": BF16_BYTES, "fp16": BF16_BYTES}
"""Weights used for computing."""
GRADIENT_BYTES = WORK_BYTES | {"fp16": FLOAT_BYTES}
"""The gradient, if each microbatch's is used at once."""
UNSENT_BYTES = FLOAT_BYTES
"""Momentum of votes, or the residual of local steps."""
MOMENT_BYTES = BF16_BYTES
"""Each moment of a local optimizer."""
AT_WORK_BYTES = 2
"""Temporary memory of votes: their sums, and a step."""
TILE_BYTES = 12 * 2**20
"""Temporary memory of local steps, in bytes per tile (`swarmnet/optimizer/tiling.py`): settled weights, delta
and their sum. Tiles on a GPU are eight times as large."""
MUONS_NUMBERS, MUONS_SQUARES = 7, 2
"""Temporary memory of Muon: float32 numbers per number of a matrix, and per square of its smaller side,
during the Newton-Schulz iteration. They are the gradient, the momentum, their sum, the values before and
after a step, and buffers of matrix products. Measured with sides of 512 to 1,536 (docs/benchmarks/memory.md).
A GPU processes several matrices at once."""
COPY_BYTES = 2 * FLOAT_BYTES
"""A checkpoint that is being written: a copy of the weights, and its floats."""
FREED_BYTES = FLOAT_BYTES
"""Memory that is freed but not yet returned: vectors come and go in each round (docs/volunteer.md)."""
RESULT_AT_WORK_BYTES = 2
"""Temporary memory of one round's results: numbers that are being read, and results that are being made."""
ROUNDS_BESIDES = 2
"""Open rounds in addition to the window: the current one and the next one to settle."""
PROCESS_BYTES = 330_000_000
"""Python and torch without a stage: a paused peer had 303 to 313 MB resident (docs/volunteer.md)."""
DAEMON_BYTES = 160_000_000
"""Maximum of p2pd, as `protocols/daemon/p2pd.py` limits it."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory needs of a stage in bytes."""

    stage: int
    weights: int
    """What is kept whether or not anything is computed."""
    graph: int
    """Each open microbatch, including the version of the weights that only it uses."""
    process: int
    """Programs and libraries."""

    @property
    def least(self) -> int:
        """Need with one microbatch at a time."""
        return self.process + self.weights + self.graph

    def graphs_within(self, limit: int) -> int:
        """Return how many microbatches fit below a limit; 0 if none does."""
        return max(0, (limit - self.process - self.weights) // self.graph)


def needs_of(
    manifest: Manifest, stage: int, process_bytes: int, computing: Computing = PLAIN, is_small: bool = False
) -> Needs:
    """Return the memory needs of a stage. `process_bytes` is what programs and libraries take of the same
    memory; 0 means that the stage is in GPU memory, without copies for the disk. `is_small` means that the
    group has few peers, so that sums of their one-bit updates fit in one byte."""
    layout = trained_layout(manifest, stage)
    work, local_steps = WORK_BYTES[computing.dtype], manifest.sync.local_steps
    microbatches_per_step = manifest.sync.step_microbatches(manifest.microbatch_tokens)
    # With a local step per microbatch, gradients are used at once. Otherwise they are summed in float32.
    is_used_at_once = local_steps is not None and microbatches_per_step == 1
    gradient = GRADIENT_BYTES[computing.dtype] if is_used_at_once else FLOAT_BYTES
    per_parameter = GRID_BYTES + work + FREED_BYTES  # Settled and computing weights, memory freed late.
    if process_bytes:  # Copies for the disk; a settled momentum is copied as the weights are.
        per_parameter += COPY_BYTES * (2 if manifest.sync.settles_momentum else 1)
    trained = trained_part(layout, manifest.model.experts)
    weights = layout.size * per_parameter + trained.size * (gradient + UNSENT_BYTES)
    weights += _temporary_bytes(manifest, layout, trained, work, not process_bytes)
    open_rounds = manifest.rounds.window + ROUNDS_BESIDES
    sizes = sizes_of(layout, manifest.model.experts)
    weights += manifest.sync.config.kept_bytes(sizes, open_rounds, is_small)
    if local_steps is not None and (process_bytes or computing.optimizer_state == "device"):
        weights += _moment_bytes(local_steps.inner_optimizer, trained)
    # Frozen weights: kept as units in host memory, copied for the disk, and used for computing.
    frozen = work + ((GRID_BYTES + COPY_BYTES + FREED_BYTES) if process_bytes else 0)
    weights += frozen_layout(manifest, stage).size * frozen
    weights += graph_at_work(manifest, stage, computing)
    graph = graph_bytes(manifest, stage, computing)
    if waits(manifest, stage):
        # A waiting microbatch needs the version of the weights with which it began. A local step makes a new
        # version after k microbatches, so n waiting ones need (n + k - 1) / k versions. Each microbatch thus
        # adds 1 / k of a version, and the rest is needed once. Without local steps one version is enough.
        version = layout.size * work
        version_share = version // microbatches_per_step if local_steps is not None else 0
        graph += version_share
        weights += version - version_share
    return Needs(stage, weights=weights, graph=graph, process=process_bytes)


def waits(manifest: Manifest, stage: int) -> bool:
    """Return whether microbatches wait between their forward and backward pass: not in the last stage."""
    return not manifest.span(stage).has_head


def spread_over(
    needs: Needs, manifest: Manifest, devices: int, computing: Computing = PLAIN, remote_devices: int = 0
) -> Needs:
    """Return the needs if a stage is split over several devices. GPUs have their own memory (`needs.process`
    is 0): the result is for one of them. CPU devices share the host's: the result is for all together.
    `remote_devices` are on other hosts. Each device at times also holds two copies of a whole layer and of
    the tables (all parameters outside layers), and their gradient. Matrices that `low-rank` gathers take
    less: at most two at once, in float32, of the several in a layer, and at other times."""
    layout = trained_layout(manifest, needs.stage)
    layers: dict[str, int] = {}
    tables = 0
    for entry in layout.entries:
        if entry.name.startswith("model.layers."):
            layer = ".".join(entry.name.split(".")[:3])  # Such as model.layers.7.
            layers[layer] = layers.get(layer, 0) + entry.size
        else:
            tables += entry.size
    extra = (2 * WORK_BYTES[computing.dtype] + FLOAT_BYTES) * (max(layers.values()) + tables)
    count = devices + remote_devices
    here = devices if needs.process else 1  # The devices whose memory is counted.
    return replace(
        needs,
        weights=-(-needs.weights * here // count) + here * extra,
        graph=-(-needs.graph * here // count),
        process=needs.process + here * PROCESS_BYTES if needs.process else 0,
    )


def _temporary_bytes(manifest: Manifest, layout: Layout, trained: Layout, work: int, on_gpu: bool) -> int:
    """Return the bytes of temporary tensors while a microbatch or a round is computed. With local steps it is
    the largest of four: a tile (the part of a vector that is computed at once), a gradient, the results of a
    round, and a step of Muon. A GPU takes such steps for many matrices of one shape at once. `trained` is the
    part of `layout` that this peer trains. `work` is the bytes of a weight used for computing."""
    local_steps = manifest.sync.local_steps
    if local_steps is None:
        votes = layout.size * AT_WORK_BYTES
        is_muon = manifest.sync.config.orthogonalizes_gradients
        return max(votes, _muon_step_bytes(trained, on_gpu)) if is_muon else votes
    tile = TILE_BYTES * (GPU_TIMES if on_gpu else 1)
    gradient = work * max((entry.size for entry in trained.entries), default=0)  # Of one parameter.
    results = RESULT_AT_WORK_BYTES * layout.size // local_steps.fragments if local_steps.is_sharded else 0
    if local_steps.inner_optimizer != "muon":
        return max(tile, gradient, results)
    return max(tile, gradient, results, _muon_step_bytes(trained, on_gpu))


def _muon_step_bytes(trained: Layout, on_gpu: bool) -> int:
    """Return the bytes of temporary tensors while Muon orthogonalizes a batch of matrices."""
    shapes = Counter(entry.shape for entry in trained.entries if trains_with_muon(entry.name, entry.shape))
    numbers = 0
    for shape, count in shapes.items():
        at_once = max(1, min(count, BATCH_NUMBERS // prod(shape))) if on_gpu else 1
        per_matrix = MUONS_NUMBERS * prod(shape) + MUONS_SQUARES * min(shape) ** 2
        numbers = max(numbers, at_once * per_matrix)
    return FLOAT_BYTES * numbers


def _moment_bytes(inner: InnerOptimizerName, layout: Layout) -> int:
    """Return the bytes of a local optimizer's moments. A parameter has one with Muon and two with AdamW. Muon
    steps only the matrices of layers, and AdamW the rest."""
    matrices = sum(entry.size for entry in layout.entries if trains_with_muon(entry.name, entry.shape))
    muons = matrices if inner == "muon" else 0
    return MOMENT_BYTES * (muons + 2 * (layout.parameters - muons))
