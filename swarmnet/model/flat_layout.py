"""Place each parameter of a stage in one flat vector, and cut that vector into chunks.

A *block* is a layer, the embedding, the head or the final norm. The matrices of a block are padded to whole
chunks of 4096. Its vectors (norms) share one chunk, padded to a power of two. Blocks never share a chunk, so
chunks, and with them all votes, are the same however the layers are cut into stages. All chunks of one size
form a *plane*, `flat[start:stop].view(-1, chunk)`, and the flat vector is a sequence of planes:

    plane 0: chunks of 4096                       plane 1: chunks of 2048    plane 2: chunks of 1024
    embedding | layer 0 | layer 1 | head          layer 0 | layer 1          final norm

One expert of a layer is a block, too. Each expert has planes of its own, after all others, with its matrices
of all layers, so that a peer can train a single expert. Trained parameters have a flat vector of their own,
which contributions, votes and momentum cover. Frozen ones are in a second one that is never exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from swarmnet.model.parameters import is_trained, parameter_shapes, trains_with_muon
from swarmnet.run.manifest import Manifest
from swarmnet.run.method_config import StageSizes
from swarmnet.run.schema import Experts

if TYPE_CHECKING:  # Code that only counts parameters starts without torch.
    from torch import Tensor

CHUNK = 4096
"""64 x 64, as DeMo cuts matrices (arXiv:2411.19870, section 3; the reference's default chunk)."""
SMALLEST_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter: `flat[place].view(shape)`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    block: str

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_vector(self) -> bool:
        return len(self.shape) <= 1

    @property
    def place(self) -> slice:
        """Range of the parameter in the flat vector."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, slots=True)
class Plane:
    """The plane `flat[offset : offset + chunks * chunk].view(chunks, chunk)`."""

    offset: int
    chunks: int
    chunk: int
    expert: int | None = None
    """Number of the expert (in each layer) that the plane belongs to; None if it belongs to no expert."""

    @property
    def stop(self) -> int:
        return self.offset + self.chunks * self.chunk


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all parameters in one flat vector."""

    entries: tuple[Entry, ...]
    planes: tuple[Plane, ...]
    """Planes with the largest chunks come first, and those of experts last, one expert after the other."""
    padding: tuple[tuple[int, int], ...]
    """[start, stop) ranges of the flat vector that belong to no parameter; kept at zero."""
    size: int
    """Number of elements of the flat vector, including padding."""

    @property
    def parameters(self) -> int:
        return sum(entry.size for entry in self.entries)

    def block_ranges(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return for each block the [start, stop) ranges of its parameters in the flat vector."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for entry in self.entries:
            ranges.setdefault(entry.block, []).append((entry.offset, entry.offset + entry.size))
        return {block: tuple(block_ranges) for block, block_ranges in ranges.items()}


NOTHING = Layout((), (), (), 0)
"""Layout without parameters."""


def views_of(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return a view of each parameter in a vector [layout.size]."""
    return {entry.name: flat[entry.place].view(entry.shape) for entry in layout.entries}


def some_planes(layout: Layout, numbers: Sequence[int]) -> Layout:
    """Return the layout of a shorter vector that contains only the planes with these indices, in this order.
    Their parameters (*entries*) and padding are moved with them."""
    entries: list[Entry] = []
    planes: list[Plane] = []
    padding: list[tuple[int, int]] = []
    size = 0
    for number in numbers:
        plane = layout.planes[number]
        shift = plane.offset - size  # How far the plane moves towards the start.
        entries += (
            replace(entry, offset=entry.offset - shift)
            for entry in layout.entries
            if plane.offset <= entry.offset < plane.stop
        )
        padding += (
            (start - shift, stop - shift)
            for start, stop in layout.padding
            if plane.offset <= start < plane.stop
        )
        planes.append(replace(plane, offset=size))
        size += plane.stop - plane.offset
    return Layout(tuple(entries), tuple(planes), tuple(padding), size)


def sizes_of(layout: Layout, experts: Experts) -> StageSizes:
    """Return the numbers of parameters of a stage, from which sync methods estimate bytes."""
    trained = trained_part(layout, experts)
    in_groups = [plane for plane in layout.planes if plane.expert is not None] if experts.groups > 1 else []
    matrices = (entry.shape for entry in trained.entries if trains_with_muon(entry.name, entry.shape))
    few = sum(plane.stop - plane.offset for plane in in_groups)
    return StageSizes(layout.size, trained.size, few, tuple(matrices))


def trained_part(layout: Layout, experts: Experts) -> Layout:
    """Return the layout of what one peer of a stage trains: everything, unless experts are in several groups.
    A peer then trains the weights outside experts and one group of experts. All groups have the same size,
    so the layout of group 0 is returned for any."""
    if experts.groups == 1:
        return layout
    numbers = [
        number
        for number, plane in enumerate(layout.planes)
        if plane.expert is None or experts.group_of(plane.expert) == 0
    ]
    return some_planes(layout, numbers)


def block_of(name: str) -> str:
    """Return the block of a parameter: `model.layers.3` for `model.layers.3.mlp.up_proj.weight`. An expert's
    block is as in `model.layers.3.mlp.experts.5`. Outside the layers a name is its own block."""
    parts = name.split(".")
    if expert_of(name) is not None:
        return ".".join(parts[:6])
    return ".".join(parts[:3]) if parts[:2] == ["model", "layers"] else name


def expert_of(name: str) -> int | None:
    """Return the number of the parameter's expert in its layer; None if it belongs to no expert."""
    parts = name.split(".")
    return int(parts[5]) if parts[3:5] == ["mlp", "experts"] else None


def layout_of(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return the layout of the parameters `shapes` (global name -> shape, in model order). Matrices and
    vectors of a block go into planes of different chunk sizes, and those of an expert into its own planes."""
    plane_blocks: _PlaneBlocks = {}
    for block in dict.fromkeys(map(block_of, shapes)):
        members = [(name, shape) for name, shape in shapes.items() if block_of(name) == block]
        matrices = [(name, shape) for name, shape in members if len(shape) > 1]
        vectors = [(name, shape) for name, shape in members if len(shape) <= 1]
        for members_of_kind in (matrices, vectors):
            length = sum(prod(shape) for _, shape in members_of_kind)
            if not length:
                continue
            chunk = CHUNK if members_of_kind is matrices else _power_of_two(length)
            chunks = -(-length // chunk)
            first_name, _ = members_of_kind[0]
            expert = expert_of(first_name)
            plane_blocks.setdefault((expert, chunk), []).append((chunks, members_of_kind))
    return _place_planes(plane_blocks)


def trained_layout(manifest: Manifest, stage: int) -> Layout:
    return _layout(manifest, stage, trained=True)


def frozen_layout(manifest: Manifest, stage: int) -> Layout:
    """Return the layout of the frozen parameters of a stage; its size is 0 if all are trained."""
    return _layout(manifest, stage, trained=False)


def _layout(manifest: Manifest, stage: int, *, trained: bool) -> Layout:
    shapes = parameter_shapes(manifest.model, manifest.span(stage))
    return layout_of({name: size for name, size in shapes.items() if is_trained(manifest, name) is trained})


_PlaneBlocks: TypeAlias = dict[tuple[int | None, int], list[tuple[int, list[tuple[str, tuple[int, ...]]]]]]
"""Maps (expert, chunk size) of a plane to the number of chunks and the parameters of each block."""


def _place_planes(plane_blocks: _PlaneBlocks) -> Layout:
    """Return the layout with one plane for each (expert, chunk size). Planes outside experts come first, then
    those of each expert; among these, larger chunks come first. `plane_blocks` has the number of chunks and
    the parameters of each block of a plane. The end of each block is padded to a whole chunk."""
    entries: list[Entry] = []
    planes: list[Plane] = []
    padding: list[tuple[int, int]] = []
    offset = 0

    def position(plane: tuple[int | None, int]) -> tuple[int, int]:
        expert, chunk = plane
        return -1 if expert is None else expert, -chunk

    for expert, chunk in sorted(plane_blocks, key=position):
        start = offset
        for chunks, members in plane_blocks[expert, chunk]:
            stop = offset + chunks * chunk
            for name, shape in members:
                entries.append(Entry(name, shape, offset, block_of(name)))
                offset += prod(shape)
            if offset < stop:
                padding.append((offset, stop))
            offset = stop
        planes.append(Plane(start, (offset - start) // chunk, chunk, expert))
    return Layout(tuple(entries), tuple(planes), tuple(padding), offset)


def _power_of_two(length: int) -> int:
    """Return the smallest power of two that is at least `length`, between SMALLEST_CHUNK and CHUNK."""
    return min(CHUNK, max(SMALLEST_CHUNK, 1 << (length - 1).bit_length()))
