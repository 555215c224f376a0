"""Local steps with sharded reduction: a few reducers sum the deltas and return the means in four bits per
number.

The chunks of every plane are divided into `sync.shards` shards. A contribution (`local_steps.py`) is cut into
one slice per shard. The reducer of a shard averages the slices that it received, and publishes the mean in
its result. For each chunk this is a power of two, and for each number a multiple of it from -7 to 7.

A round's step is the mean of its results, weighted by their numbers of contributors. It is an integer
function of the set of results, as a result is of its slices. Any peer that has the slices can therefore
verify a result.

Shapes: C chunks of a plane or of a shard of it, M numbers of a chunk that a round covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarmnet.model.computing.shares import PlaneShare
from swarmnet.model.flat_layout import Layout, Plane
from swarmnet.optimizer.delta_codecs import exponents
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST_EXPONENT, bytes_of, sum_of
from swarmnet.optimizer.delta_codecs.e3m0_codec import nibbles_read, nibbles_written
from swarmnet.optimizer.delta_codecs.packed_sums import Sums, packed
from swarmnet.optimizer.device_groups.device_group import ALONE, DeviceGroup
from swarmnet.optimizer.device_groups.payload import Sections
from swarmnet.optimizer.index_code import ContributionError, packed_bytes
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.local_steps.local_steps import FragmentStep, LocalSteps
from swarmnet.optimizer.result_parts import ResultParts, ResultTally
from swarmnet.optimizer.tiling import Tile, all_tiles, rows_of
from swarmnet.rounds.result_table import Contributor, longest_head
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE

BITS = 4
"""Bits per number of a result."""
MOST = 7
"""Largest level. Levels are -7 to 7; the sixteenth code is unused."""
FINENESS = 3
"""The step between levels is the smallest power of two that is at least a third of the mean magnitude.

For normally distributed numbers, the outermost level is then at 1.9 to 3.7 standard deviations. The optimum
for fifteen levels is 2.2 (Max, "Quantizing for minimum distortion", 1960, table I).
"""


class ShardedPart:
    """The shards of planes with the same contributors: those of a stage, or of a group of experts."""

    def __init__(self, said: LocalSteps, shards: int, planes: Sequence[Plane]) -> None:
        """`said` is the method that decodes the deltas of these planes. If several devices hold the stage, it
        has a share of them."""
        self.said = said
        self.shards = shards
        self.planes = planes
        self.slice_bytes = [
            sum(bytes_of(said.code, count, said.width(plane)) for plane, count in self._counts(shard))
            for shard in range(shards)
        ]
        self.number_bytes = [sum(self._sizes(shard)) for shard in range(shards)]

    def rows(self, shard: int) -> list[int]:
        """Return the number of chunks of each plane in a shard."""
        return [count for _, count in self._counts(shard)]

    def slices(self, payload: bytes) -> list[bytes]:
        """Return the slice of a payload for each shard. Raises ContributionError."""
        moves = list(self.said.moves_of(payload))
        return [
            b"".join(
                of_plane.rows(rows_of(plane, shard, self.shards)).written()
                for plane, of_plane in zip(self.planes, moves, strict=True)
            )
            for shard in range(self.shards)
        ]

    def check(self, shard: int, data: bytes) -> None:
        """Raise ContributionError unless `data` is a valid slice."""
        self.said.check(data, self.rows(shard))

    def mean(self, shard: int, slices: Sequence[bytes]) -> bytes:
        """Return the encoded mean of at least one slice of a shard. Raises ContributionError."""
        rows, parts = self.rows(shard), []
        contributions = [list(self.said.moves_of(data, rows)) for data in slices]
        for plane in range(len(rows)):
            sum_CM = sum_of([moves[plane] for moves in contributions])
            parts.append(QuantizedMean.of(sum_CM, len(contributions)).written())
        return b"".join(parts)

    def numbers(self, shard: int, data: memoryview) -> Iterator[QuantizedMean]:
        """Yield the decoded mean of each plane in an encoded mean. Raises ContributionError."""
        start, said = 0, self.said
        for (plane, count), size in zip(self._counts(shard), self._sizes(shard), strict=True):
            yield QuantizedMean.read(data[start : start + size], count, said.width(plane), said.codec_device)
            start += size

    def _sizes(self, shard: int) -> list[int]:
        """Return the encoded bytes of each plane's mean in a shard."""
        return [_numbers_bytes(count, self.said.width(plane)) for plane, count in self._counts(shard)]

    def _counts(self, shard: int) -> list[tuple[Plane, int]]:
        """Return each plane with the number of its chunks in a shard."""
        return [(plane, _count(rows_of(plane, shard, self.shards))) for plane in self.planes]


@dataclass(frozen=True, slots=True)
class ShardMean:
    """The mean that a result contains for one plane's chunks in one shard."""

    plane: int
    """Number of the plane within the stage."""
    numbers: QuantizedMean
    speakers: int
    """Number of contributors that the mean covers."""


class ReducedSteps(ResultParts):
    """The sync method with sharded reduction, for one peer and one stage. Its local steps are those of
    `LocalSteps`."""

    held: ExpertShardSteps | None = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self.own: LocalSteps | ExpertShardSteps = LocalSteps(manifest, layout, device)
        super().__init__(manifest=manifest, device=device, maker=self.own)
        self.layout = layout
        self.planes: Sequence[PlaneShare] = ALONE.planes(layout)
        """The planes of the whole stage, with this device's chunks."""
        self._whole = ShardedPart(self.own, self.shards, layout.planes)
        self.slice_bytes = self._whole.slice_bytes
        self.number_bytes = sum(self._whole.number_bytes)
        """Encoded bytes of all shards' means of a round, without tables, if every plane has contributions."""
        self.longest_result = longest_head(self.shards) + self.number_bytes

    def use_device_group(self, company: DeviceGroup) -> None:
        """Use collectives of several devices for local steps. A device reads whole results, and steps by the
        chunks that it has. Only the peer's own process cuts and sums slices."""
        assert isinstance(self.own, LocalSteps), "part.py refuses groups of experts"
        self.own.use_device_group(company)
        self.planes = company.planes(self.layout)
        self._whole = ShardedPart(self.own, self.shards, [share.whole for share in self.planes])

    @property
    def sections(self) -> Sections:
        assert isinstance(self.own, LocalSteps), "part.py refuses groups of experts"
        return self.own.sections

    @property
    def reduced(self) -> ReducedSteps:
        return self

    def all_sums_bytes(self, contributors: int) -> int:
        return self.number_bytes

    def slices(self, payload: bytes) -> list[bytes]:
        return self._whole.slices(payload)

    def check_slice(self, shard: int, data: bytes) -> None:
        self._whole.check(shard, data)

    def sums(self, shard: int, slices: Mapping[Contributor, bytes]) -> bytes:
        return self._whole.mean(shard, list(slices.values()))

    def sums_bytes(self, shard: int, contributors: int, sums: memoryview) -> int:
        return self._whole.number_bytes[shard]

    def encode_mean(self, shard: int, contributors: int, sums: memoryview) -> Iterator[ShardMean]:
        """Yield the means in a shard's part of a result. Raises ContributionError."""
        for plane, numbers in enumerate(self._whole.numbers(shard, sums)):
            yield ShardMean(plane, numbers, contributors)

    def check(self, payload: bytes) -> None:
        for _ in self.shard_means(payload):
            pass

    def tally(self, round: int) -> MeanTally:
        return MeanTally(self, round)

    def shard_means(self, result: bytes) -> Iterator[tuple[int, list[ShardMean]]]:
        """Yield the shards in a result and their means. Raises ContributionError."""
        table, sums = self.parts_of(result)
        for shard, encoded in sums.items():
            yield shard, list(self.encode_mean(shard, len(table.shards[shard]), encoded))


@dataclass(frozen=True, slots=True)
class QuantizedMean:
    """The quantized mean of one plane's chunks in one shard."""

    exponents: Tensor
    """int32 [C, 1]: the step between levels is 2 to this power, in units."""
    levels: Tensor
    """int8 [C, M]: -7 to 7."""

    @classmethod
    def of(cls, sum_CM: Tensor, count: int) -> QuantizedMean:
        """Return the nearest representable mean of `count` deltas with this sum, halves rounded upwards. It
        uses integers only, so that any peer can reproduce it."""
        sizes_C1 = sum_CM.abs().sum(dim=1, keepdim=True, dtype=torch.int64)
        exponents_C1 = torch.zeros_like(sizes_C1)
        for exponent in range(LARGEST_EXPONENT):
            exponents_C1 += (FINENESS * sum_CM.shape[1] * count << exponent) < sizes_C1
        step_C1 = count << exponents_C1
        levels_CM = torch.div(2 * sum_CM.long() + step_C1, 2 * step_C1, rounding_mode="floor")
        return cls(exponents_C1.to(torch.int32), levels_CM.clamp(-MOST, MOST).to(torch.int8))

    def units(self) -> Tensor:
        """Return the mean in units, int64 [C, M]."""
        return self.levels.long() << self.exponents.long()

    def rows(self, rows: slice) -> QuantizedMean:
        """Return the mean of these chunks alone."""
        return QuantizedMean(self.exponents[rows], self.levels[rows])

    def written(self) -> bytes:
        """Return the bytes that `read` parses."""
        nibbles = (self.levels.cpu().numpy() + np.int8(MOST + 1)).view(np.uint8)
        return exponents.written(self.exponents) + nibbles_written(nibbles)

    @classmethod
    def read(cls, data: memoryview, count: int, width: int, device: torch.device) -> QuantizedMean:
        """Parse `count` chunks of `width` numbers. Raises ContributionError for other data."""
        exponents_C = exponents.read(data, count, LARGEST_EXPONENT)
        nibbles = nibbles_read(data[count:], count * width)
        if nibbles.min(initial=MOST) < 1:
            raise ContributionError("a result contains the unused four-bit code")
        levels = (nibbles.astype(np.int8) - np.int8(MOST + 1)).reshape(count, width)
        return cls(exponents.tensor_of(exponents_C, device), torch.from_numpy(levels).to(device))


@dataclass(frozen=True, slots=True)
class _WeightedMean:
    """The mean of some chunks of a plane from one result, with its weight."""

    rows: slice
    numbers: QuantizedMean
    weight: int

    def add_to(self, sum_CM: Tensor, counts_C1: Tensor, tile: Tile) -> None:
        """Add the weighted mean to the int64 sums of a tile, and the weight to their counts."""
        first, last = max(self.rows.start, tile.first), min(self.rows.stop, tile.last)
        if first < last:
            here = slice(first - tile.first, last - tile.first)
            there = slice(first - self.rows.start, last - self.rows.start)
            sum_CM[here] += self.numbers.rows(there).units() * self.weight
            counts_C1[here] += self.weight


class MeanTally(ResultTally):
    """The results of one round. They are combined when a step is requested."""

    def __init__(self, method: ReducedSteps, round: int) -> None:
        super().__init__(method, round)
        self._method = method

    def step(self, factor: int = WHOLE) -> FragmentStep:
        """Return the step by each shard's mean. `factor` is not used: it scaled the local steps."""
        method = self._method
        means: dict[tuple[int, int], list[ShardMean]] = {}  # By plane and shard.
        for payload, counted in self._counted():
            for shard, of_shard in method.shard_means(payload):
                if shard in counted:
                    for mean in of_shard:
                        means.setdefault((mean.plane, shard), []).append(mean)
        weighted: dict[int, list[_WeightedMean]] = {}
        for (plane, shard), by_results in means.items():
            alone = len(by_results) == 1  # Its mean is then the mean; weight 1 keeps sums small.
            share = method.planes[plane]
            if share.number is None:
                continue
            of_plane = weighted.setdefault(share.number, [])
            for there, here in share.within(rows_of(share.whole, shard, method.shards)):
                of_plane += (
                    _WeightedMean(here, one.numbers.rows(there), 1 if alone else one.speakers)
                    for one in by_results
                )
        return FragmentStep(method.own, self._round, dict(self._sums(weighted)))

    def _sums(self, weighted: Mapping[int, Sequence[_WeightedMean]]) -> Iterator[tuple[int, Sums]]:
        """Yield the start and the sums of each tile whose plane has contributions."""
        method = self._method
        for tile in all_tiles(method.layout, method.device):
            if tile.number not in weighted:
                continue
            sum_CM = torch.zeros(
                tile.chunks, method.own.width(tile.plane), dtype=torch.int64, device=method.device
            )
            counts_C1 = torch.zeros_like(sum_CM[:, :1])
            for each in weighted[tile.number]:
                each.add_to(sum_CM, counts_C1, tile)
            yield tile.start, packed(sum_CM, counts_C1.clamp_(min=1))


def _count(rows: slice) -> int:
    """Return the number of chunks in a slice."""
    return int(rows.stop - rows.start)


def _numbers_bytes(count: int, width: int) -> int:
    """Return the encoded bytes of a `QuantizedMean`."""
    return count + packed_bytes(count, BITS * width)
