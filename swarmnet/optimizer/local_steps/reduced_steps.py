"""Local steps through reducers: what peers moved is added up by few, and comes back as numbers of four bits.

The chunks of every plane are dealt into `sync.shards` shards. A contribution (local_steps.py) is cut into as
many slices; whoever reduces a shard adds up the slices that came, and its result says their mean: for each
chunk a power of two, and for each number a multiple of it from -7 to 7. A round's step is the mean of its
results, each weighted by how many it speaks for: integers, and a pure function of the set of results, as
results are of the slices, so that anybody who has these can make them again.

Shapes: C chunks of a plane or of a shard of it, M numbers of a chunk that a round speaks of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.delta_codecs import exponents
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST_EXPONENT, sum_of
from swarmnet.optimizer.delta_codecs.e3m0_codec import nibbles_read, nibbles_written
from swarmnet.optimizer.delta_codecs.packed_sums import Sums, packed
from swarmnet.optimizer.index_code import ContributionError, packed_bytes
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.local_steps.local_steps import LocalSteps, PartStep, rows_of
from swarmnet.optimizer.tiling import Tile, all_tiles
from swarmnet.rounds.result_table import (
    Contributor,
    Table,
    counting,
    draw_of,
    head_of,
    longest_head,
    read_head,
    read_result,
)
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE

BITS = 4
"""Of a number."""
MOST = 7
"""Of four bits: -7 to 7, and no meaning for the sixteenth."""
FINENESS = 3
"""A step of the numbers is the smallest power of two that is a third of their mean size or more: the
outermost is 1.9 to 3.7 deviations of normally distributed ones (Max, "Quantizing for minimum distortion",
1960, table I: 2.2 for fifteen levels)."""


class ShardedPart:
    """Some planes of which the same peers speak, in shards: all of a stage, or a group of experts."""

    def __init__(self, said: LocalSteps, shards: int) -> None:
        """`said`: by which is read what is told of them."""
        self.said, self.shards = said, shards
        self.slice_bytes = [said.bytes_of(self.rows(shard)) for shard in range(shards)]
        self.number_bytes = [sum(self._sizes(shard)) for shard in range(shards)]

    def rows(self, shard: int) -> list[int]:
        """How many chunks of each plane a shard has."""
        return [_count(rows_of(plane, shard, self.shards)) for plane in self.said.layout.planes]

    def slices(self, payload: bytes) -> list[bytes]:
        moves = list(self.said.moves_of(payload))
        return [
            b"".join(
                of_plane.rows(rows_of(plane, shard, self.shards)).written()
                for plane, of_plane in zip(self.said.layout.planes, moves, strict=True)
            )
            for shard in range(self.shards)
        ]

    def check(self, shard: int, data: bytes) -> None:
        """ContributionError."""
        self.said.check(data, self.rows(shard))

    def mean(self, shard: int, slices: Sequence[bytes]) -> bytes:
        """Of what these say of a shard, of each plane. At least one. ContributionError."""
        rows, parts = self.rows(shard), []
        contributions = [list(self.said.moves_of(data, rows)) for data in slices]
        for plane in range(len(rows)):
            sum_CM = sum_of([moves[plane] for moves in contributions])
            parts.append(QuantizedMean.of(sum_CM, len(contributions)).written())
        return b"".join(parts)

    def numbers(self, shard: int, data: memoryview) -> Iterator[QuantizedMean]:
        """A mean as it was written, of each plane. ContributionError."""
        start, said = 0, self.said
        for plane, count, size in zip(said.layout.planes, self.rows(shard), self._sizes(shard), strict=True):
            yield QuantizedMean.read(data[start : start + size], count, said.width(plane), said.device)
            start += size

    def _sizes(self, shard: int) -> list[int]:
        rows = zip(self.said.layout.planes, self.rows(shard), strict=True)
        return [_numbers_bytes(count, self.said.width(plane)) for plane, count in rows]


@dataclass(frozen=True, slots=True)
class ShardMean:
    """What a result says of the chunks of one plane that are in one shard."""

    plane: int
    """Of the stage."""
    numbers: QuantizedMean
    speakers: int
    """Whose mean it is."""


class ReducedSteps:
    """One peer of one stage; its own steps are those of `LocalSteps`."""

    held: ExpertShardSteps | None = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self.own: LocalSteps | ExpertShardSteps = LocalSteps(manifest, layout, device)
        self._whole = ShardedPart(self.own, manifest.sync.shards)
        self._begin(manifest, layout, device)
        self.slice_bytes = self._whole.slice_bytes
        self.number_bytes = sum(self._whole.number_bytes)
        """Of all results of a round in which somebody speaks of all planes, without their tables."""
        self.longest_result = longest_head(self.shards) + self.number_bytes

    def _begin(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self.layout, self.state, self.device = layout, self.own.state, device
        self.shards, self.draw = manifest.sync.shards, draw_of(manifest)
        self.payload_bytes = self.own.payload_bytes
        self.votes, self.lookahead_accuracy = self.own.votes, self.own.lookahead_accuracy
        self.contribute, self.lookahead, self.give_back = (
            self.own.contribute, self.own.lookahead, self.own.give_back
        )  # fmt: skip

    @property
    def reduced(self) -> ReducedSteps:
        return self

    @property
    def gradient_norm(self) -> float | None:
        return self.own.gradient_norm

    @property
    def momentum_norm(self) -> float | None:
        return self.own.momentum_norm

    def slices(self, payload: bytes) -> list[bytes]:
        return self._whole.slices(payload)

    def check_slice(self, shard: int, data: bytes) -> None:
        self._whole.check(shard, data)

    def sums(self, shard: int, slices: Mapping[Contributor, bytes]) -> bytes:
        """What a result says of a shard: a function of its slices, in any order. ContributionError."""
        return self._whole.mean(shard, list(slices.values()))

    def sums_bytes(self, shard: int, contributors: int, sums: memoryview) -> int:
        """How long that is, of so many, where `sums` begin with it. ContributionError."""
        return self._whole.number_bytes[shard]

    def encode_mean(self, shard: int, contributors: int, sums: memoryview) -> Iterator[ShardMean]:
        """What it says. ContributionError."""
        for plane, numbers in enumerate(self._whole.numbers(shard, sums)):
            yield ShardMean(plane, numbers, contributors)

    def reduce(self, slices: Mapping[int, Mapping[Contributor, bytes]]) -> bytes:
        table = Table({shard: frozenset(given) for shard, given in slices.items() if given})
        sums = b"".join(self.sums(shard, slices[shard]) for shard in sorted(table.shards))
        return head_of(table, sums) + sums

    def follows(self, result: bytes, shard: int, slices: Mapping[Contributor, bytes]) -> bool:
        said = self._read(result)[1][shard]
        try:
            for data in slices.values():
                self.check_slice(shard, data)
            made = self.sums(shard, slices)
        except ContributionError:
            return False
        return said == made

    def head(self, result: bytes) -> tuple[Table, int]:
        return read_head(result, self.shards)

    def table(self, result: bytes) -> Table:
        return self._read(result)[0]

    def _read(self, result: bytes) -> tuple[Table, dict[int, memoryview]]:
        """Who is in it, and what it says of each of its shards. ContributionError."""
        table, sums = read_result(result, self.shards)
        start, found = 0, {}
        for shard in sorted(table.shards):
            size = self.sums_bytes(shard, len(table.shards[shard]), sums[start:])
            found[shard] = sums[start : start + size]
            start += size
        if len(sums) != start:
            raise ContributionError(f"sums of {len(sums)} bytes, which the result's table does not fit")
        return table, found

    def check(self, payload: bytes) -> None:
        for _ in self.said_of(payload):
            pass

    def tally(self, round: int) -> ResultTally:
        return ResultTally(self, round)

    def said_of(self, result: bytes) -> Iterator[tuple[int, list[ShardMean]]]:
        """Of each shard in it. ContributionError."""
        table, sums = self._read(result)
        for shard, said in sums.items():
            yield shard, list(self.encode_mean(shard, len(table.shards[shard]), said))


@dataclass(frozen=True, slots=True)
class QuantizedMean:
    """The mean that a result says of the chunks of one plane that are in one shard."""

    exponents: Tensor
    """int32 [C, 1]: of 2, in units."""
    levels: Tensor
    """int8 [C, M]: -7 to 7."""

    @classmethod
    def of(cls, sum_CM: Tensor, count: int) -> QuantizedMean:
        """What is nearest to a sum over `count`, halves upwards. In integers: it can be made again
        anywhere."""
        sizes_C1 = sum_CM.abs().sum(dim=1, keepdim=True, dtype=torch.int64)
        exponents_C1 = torch.zeros_like(sizes_C1)
        for exponent in range(LARGEST_EXPONENT):
            exponents_C1 += (FINENESS * sum_CM.shape[1] * count << exponent) < sizes_C1
        step_C1 = count << exponents_C1
        levels_CM = torch.div(2 * sum_CM.long() + step_C1, 2 * step_C1, rounding_mode="floor")
        return cls(exponents_C1.to(torch.int32), levels_CM.clamp(-MOST, MOST).to(torch.int8))

    def units(self) -> Tensor:
        """int64 [C, M]."""
        return self.levels.long() << self.exponents.long()

    def rows(self, rows: slice) -> QuantizedMean:
        return QuantizedMean(self.exponents[rows], self.levels[rows])

    def written(self) -> bytes:
        nibbles = (self.levels.cpu().numpy() + np.int8(MOST + 1)).view(np.uint8)
        return exponents.written(self.exponents) + nibbles_written(nibbles)

    @classmethod
    def read(cls, data: memoryview, count: int, width: int, device: torch.device) -> QuantizedMean:
        """ContributionError where `data` is nothing that `written` gives."""
        exponents_C = exponents.read(data, count, LARGEST_EXPONENT)
        nibbles = nibbles_read(data[count:], count * width)
        if nibbles.min(initial=MOST) < 1:
            raise ContributionError("four bits of a result that say nothing")
        levels = (nibbles.astype(np.int8) - np.int8(MOST + 1)).reshape(count, width)
        return cls(exponents.tensor_of(exponents_C, device), torch.from_numpy(levels).to(device))


@dataclass(frozen=True, slots=True)
class _WeightedMean:
    """By one result, of some chunks of a plane."""

    rows: slice
    numbers: QuantizedMean
    weight: int

    def add_to(self, sum_CM: Tensor, counts_C1: Tensor, tile: Tile) -> None:
        """To int64 sums of a tile, and to how many each is of."""
        first, last = max(self.rows.start, tile.first), min(self.rows.stop, tile.last)
        if first < last:
            here = slice(first - tile.first, last - tile.first)
            there = slice(first - self.rows.start, last - self.rows.start)
            sum_CM[here] += self.numbers.rows(there).units() * self.weight
            counts_C1[here] += self.weight


class ResultTally:
    """One round's results as they came; they are put together when a step is asked for."""

    def __init__(self, method: ReducedSteps, round: int) -> None:
        self._method, self._round = method, round
        self._results: dict[PeerId, tuple[bytes, Table]] = {}

    def add(self, peer: PeerId, payload: bytes) -> None:
        if peer in self._results:
            raise ValueError(f"{peer} is in the tally of round {self._round} already: remove it first")
        self._method.check(payload)
        self._results[peer] = payload, self._method.head(payload)[0]

    def remove(self, peer: PeerId) -> None:
        del self._results[peer]

    def rest(self) -> None:
        """Nothing is kept but the set."""

    def step(self, factor: int = WHOLE) -> PartStep:
        """Of each shard the mean; `factor` had its say when the peers stepped."""
        method = self._method
        tables = {peer: table for peer, (_, table) in self._results.items()}
        counted = counting(tables, method.draw, self._round)
        spoken: dict[tuple[int, int], list[ShardMean]] = {}
        """By plane and shard."""
        for peer, (payload, _) in self._results.items():
            for shard, said_of_shard in method.said_of(payload):
                if peer in counted[shard]:
                    for of_plane in said_of_shard:
                        spoken.setdefault((of_plane.plane, shard), []).append(of_plane)
        said: dict[int, list[_WeightedMean]] = {}
        for (plane, shard), by_results in spoken.items():
            alone = len(by_results) == 1  # Then its mean is the mean, and a small number.
            rows = rows_of(method.layout.planes[plane], shard, method.shards)
            said.setdefault(plane, []).extend(
                _WeightedMean(rows, one.numbers, 1 if alone else one.speakers) for one in by_results
            )
        return PartStep(method.own, self._round, dict(self._sums(said)))

    def _sums(self, said: Mapping[int, Sequence[_WeightedMean]]) -> Iterator[tuple[int, Sums]]:
        """Of the planes of which somebody said something."""
        method = self._method
        for tile in all_tiles(method.layout, method.device):
            if tile.number not in said:
                continue
            sum_CM = torch.zeros(
                tile.chunks, method.own.width(tile.plane), dtype=torch.int64, device=method.device
            )
            counts_C1 = torch.zeros_like(sum_CM[:, :1])
            for each in said[tile.number]:
                each.add_to(sum_CM, counts_C1, tile)
            yield tile.start, packed(sum_CM, counts_C1.clamp_(min=1))

    def vote_agreement(self, me: PeerId) -> None:
        """Sizes are no votes."""


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _numbers_bytes(count: int, width: int) -> int:
    """Of `QuantizedMean` of so many chunks."""
    return count + packed_bytes(count, BITS * width)
