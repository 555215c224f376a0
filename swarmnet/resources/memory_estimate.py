"""How much memory a stage takes, from the manifest alone: said before anything is fetched.

The terms are the tensors that a worker holds (swarmnet/optimizer/replica.py, model/stage_compute.py and the
methods), in bytes per parameter; `swarmnet bench memory` measures them (docs/benchmarks/memory.md). Snapshots
for newcomers lie on the disk. No IO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.flat_layout import Layout, frozen_layout, held_part, trained_layout
from swarmnet.model.parameters import is_muons
from swarmnet.optimizer.own_steps.inner_step import BATCH_NUMBERS
from swarmnet.optimizer.tiling import GPU_TIMES
from swarmnet.pipeline.flow_control import BF16_BYTES, FLOAT_BYTES, graph_at_work, graph_bytes
from swarmnet.run.manifest import Manifest
from swarmnet.run.own_steps import InnerName, OwnSteps, SentName

GRID_BYTES = FLOAT_BYTES
"""Per parameter: settled weights."""
WORK_BYTES = {"fp32": FLOAT_BYTES, "bf16": BF16_BYTES}
"""Weights that are computed with; and the gradient, where each microbatch's is used at once."""
UNSENT_BYTES = FLOAT_BYTES
"""Momentum of votes, or what was not sent of own steps."""
MOMENT_BYTES = BF16_BYTES
"""Each moment of an optimizer of a peer's own."""
AT_WORK_BYTES = 2
"""More at times, of votes: their sums, and a step."""
TILE_BYTES = 12 * 2**20
"""More at times, of own steps: of a tile of all that a peer holds (swarmnet/optimizer/tiling.py) what is
settled, what a peer moved, and their sum. On a card tiles are eight times as large."""
MUONS_NUMBERS, MUONS_SQUARES = 7, 2
"""Or float32 numbers for each of a matrix, and for each of its smaller side squared, while Newton and
Schulz's iteration goes over it: gradient, momentum, both together, what is found before and after a step of
it, and what matrix products pack; measured with sides of 512 to 1,536 (docs/benchmarks/memory.md). A card
takes several matrices at once."""
COPY_BYTES = 2 * FLOAT_BYTES
"""A checkpoint on its way to the disk, a copy of the weights and its floats."""
FREED_BYTES = FLOAT_BYTES
"""Freed and not handed back yet, for vectors come and go with each round (docs/volunteer.md)."""
MOMENTUM_BYTES = FLOAT_BYTES
"""Where the group has a momentum: the settled one."""
BOTH_BYTES = 2 * FLOAT_BYTES
"""At times, where matrices are told by directions and voted on: what waits, as weights, and what leaves."""
CUT_BYTES = FLOAT_BYTES
"""At times, where matrices are cut in tiles: the gradient, in their order."""
SIGN_BYTES = 1
"""Per parameter and open round that was applied: what it did, a sign each."""
MOVES_BYTES: Mapping[SentName, int] = {"bit": 2, "four-bits": 2, "eight-bits": 4, "largest": 4}
"""Of own steps, for each parameter that an open round speaks of: the sum of a group. One, where few peers say
much the same sizes in a bit."""
FEW_BYTES = 1
"""Likewise, where few speak of it: of an expert those that train it, or a result of four bits a number."""
RESULT_BYTES = 0.5
"""Of a sharded exchange: of each number that an open round speaks of, what its results say."""
RESULT_AT_WORK_BYTES = 2
"""Likewise at times, of one round: numbers of its results as they are read, and results being made."""
ROUNDS_BESIDES = 2
"""Rounds open besides the window's: the one under way and the one that settles next."""
PROCESS_BYTES = 330_000_000
"""Python and torch without a stage: 303 to 313 MB were resident in a paused peer (docs/volunteer.md)."""
DAEMON_BYTES = 160_000_000
"""p2pd at its highest, as protocols/daemon/p2pd.py limits it."""


@dataclass(frozen=True, slots=True)
class Needs:
    """In bytes."""

    stage: int
    weights: int
    """Whatever is kept whether or not anything is computed."""
    graph: int
    """Each microbatch under way, besides; with it the weights that it alone was begun with."""
    process: int
    """Programs and libraries."""

    @property
    def least(self) -> int:
        """With one microbatch at a time."""
        return self.process + self.weights + self.graph

    def graphs_within(self, limit: int) -> int:
        """How many microbatches fit below a limit; 0: not even one."""
        return max(0, (limit - self.process - self.weights) // self.graph)


def needs_of(
    manifest: Manifest, stage: int, process_bytes: int, computing: Computing = PLAIN, is_small: bool = False
) -> Needs:
    """`process_bytes`: what everything else takes out of the same memory; 0: the stage lies in that of a
    card, where no copy for the disk is. `is_small`: the group is, so that sums are small integers."""
    layout = trained_layout(manifest, stage)
    work, own = WORK_BYTES[computing.dtype], manifest.sync.own_steps
    of_step = manifest.sync.step_microbatches(manifest.microbatch_tokens)
    gradient = work if own is not None and of_step == 1 else FLOAT_BYTES  # If one is used at once.
    each = GRID_BYTES + work + FREED_BYTES
    copied = 2 if own is not None and own.settles_momentum else 1  # Of momentum as of weights.
    each += copied * COPY_BYTES if process_bytes else 0
    trained = held_part(layout, manifest.model.experts)
    weights = layout.size * each + trained.size * (gradient + UNSENT_BYTES)
    weights += _at_work(manifest, layout, trained, work, not process_bytes)
    weights += _of_method(manifest, stage, layout, trained, is_small)
    if own is not None and (process_bytes or computing.moments == "device"):
        weights += _moments(own.inner, trained)
    # What is frozen: kept as units in the machine's memory, copied for the disk, and computed with.
    fixed = work + ((GRID_BYTES + COPY_BYTES + FREED_BYTES) if process_bytes else 0)
    weights += frozen_layout(manifest, stage).size * fixed
    weights += graph_at_work(manifest, stage, computing)
    graph = graph_bytes(manifest, stage, computing)
    if waits(manifest, stage):  # Of n under way (n + k - 1) / k weights that they were begun with.
        begun_with = layout.size * work
        of_each = begun_with // of_step if own is not None else 0
        graph += of_each
        weights += begun_with - of_each
    return Needs(stage, weights, graph, process_bytes)


def waits(manifest: Manifest, stage: int) -> bool:
    """Whether microbatches wait there for others between their forward and their backward pass."""
    return not manifest.span(stage).has_head


def spread_over(needs: Needs, manifest: Manifest, devices: int, computing: Computing = PLAIN) -> Needs:
    """The same on several devices. Of each, where it has a memory of its own; of the machine's, where all
    share that (`needs.process` says which). Besides its share each has at times a layer and the tables as a
    whole, as they were gathered and as they are used, and their gradient."""
    layout = trained_layout(manifest, needs.stage)
    layers: dict[str, int] = {}
    tables = 0
    for entry in layout.entries:
        layer = ".".join(entry.name.split(".")[:3])
        if entry.name.startswith("model.layers."):
            layers[layer] = layers.get(layer, 0) + entry.size
        else:
            tables += entry.size
    whole = (2 * WORK_BYTES[computing.dtype] + FLOAT_BYTES) * (max(layers.values()) + tables)
    if needs.process:
        return replace(
            needs, weights=needs.weights + devices * whole, process=needs.process + devices * PROCESS_BYTES
        )
    return replace(needs, weights=-(-needs.weights // devices) + whole, graph=-(-needs.graph // devices))


def _at_work(manifest: Manifest, layout: Layout, trained: Layout, work: int, on_card: bool) -> int:
    """While a microbatch or a round is computed, of all that comes and goes the most."""
    own = manifest.sync.own_steps
    if own is None:
        return layout.size * AT_WORK_BYTES
    tile = TILE_BYTES * (GPU_TIMES if on_card else 1)
    gradient = work * max((entry.size for entry in trained.entries), default=0)
    is_sharded = manifest.sync.exchange == "sharded"
    results = RESULT_AT_WORK_BYTES * layout.size // own.parts if is_sharded else 0
    if own.inner != "muon":
        return max(tile, gradient, results)
    shapes = Counter(entry.shape for entry in trained.entries if is_muons(entry.name, entry.shape))
    numbers = 0
    for shape, count in shapes.items():
        at_once = max(1, min(count, BATCH_NUMBERS // prod(shape))) if on_card else 1
        numbers = max(numbers, at_once * (MUONS_NUMBERS * prod(shape) + MUONS_SQUARES * min(shape) ** 2))
    return max(tile, gradient, results, FLOAT_BYTES * numbers)


def _of_method(manifest: Manifest, stage: int, layout: Layout, trained: Layout, is_small: bool) -> int:
    """What one method takes and another does not, moments aside. `trained`: what this peer trains of it."""
    sync, rounds = manifest.sync, manifest.rounds.window + ROUNDS_BESIDES
    own = sync.own_steps
    if own is None:
        at_times = BOTH_BYTES * (sync.method == "hybrid") + CUT_BYTES * (sync.cut == "tiles")
        return layout.size * (SIGN_BYTES * rounds + at_times)
    kept = layout.size * MOMENTUM_BYTES * own.settles_momentum
    kept += trained.size * UNSENT_BYTES * (own.rest == "feedback")
    each_round = _open_bytes(manifest, own, layout, trained, is_small and own.sent == "bit")
    return kept + ceil(each_round * rounds / own.parts)


def _open_bytes(
    manifest: Manifest, own: OwnSteps, layout: Layout, trained: Layout, by_few: bool
) -> float:
    """Of an open round that is about all numbers: what was told or held of them, then the round's sum, and
    what reducers found."""
    is_sharded = manifest.sync.exchange == "sharded"
    found = RESULT_BYTES * layout.size if is_sharded else 0
    if own.rest != "live":  # Its numbers are held until the round is applied.
        return FLOAT_BYTES * trained.size + FEW_BYTES * (layout.size - trained.size) + found
    in_groups = manifest.model.experts.groups > 1
    few = sum(
        plane.stop - plane.offset
        for plane in layout.planes
        if is_sharded or by_few or (in_groups and plane.expert is not None)
    )
    return FEW_BYTES * few + MOVES_BYTES[own.sent] * (layout.size - few) + found


def _moments(inner: InnerName, layout: Layout) -> int:
    """Bytes of an optimizer of a peer's own: Muon's one, AdamW's two."""
    matrices = sum(entry.size for entry in layout.entries if is_muons(entry.name, entry.shape))
    muons = matrices if inner == "muon" else 0
    return MOMENT_BYTES * (muons + 2 * (layout.parameters - muons))
