"""Local steps through reducers: what peers moved is added up by few, and comes back as numbers of four bits.

The chunks of every plane are dealt into `sync.shards` shards. A contribution (local_steps.py) is cut into as
many slices; whoever reduces a shard adds up the slices that came, and its result says their mean: for each
chunk a power of two, and for each number a multiple of it from -7 to 7. A round's step is the mean of its
results, each weighted by how many it speaks for: integers, and a pure function of the set of results, as
results are of the slices, so that anybody who has these can make them again.

Shapes: C chunks of a plane or of a shard of it, M numbers of a chunk that a round speaks of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.index_code import ContributionError, packed_bytes
from swarmnet.optimizer.moved import exponents
from swarmnet.optimizer.moved.code import LARGEST_EXPONENT, sum_of
from swarmnet.optimizer.moved.packed_sums import packed
from swarmnet.optimizer.moved.powers import nibbles_read, nibbles_written
from swarmnet.optimizer.own_steps.local_steps import LocalSteps, PartStep, rows_of
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


class ReducedSteps:
    """One peer of one stage; its own steps are those of `LocalSteps`."""

    held = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self.own = LocalSteps(manifest, layout, device)
        self.layout, self.state, self.device = layout, self.own.state, device
        self.shards = manifest.sync.shards
        self.draw = draw_of(manifest)
        self.payload_bytes = self.own.payload_bytes
        self.slice_bytes = [self.own.bytes_of(self.rows(shard)) for shard in range(self.shards)]
        self.votes, self.foresight = self.own.votes, self.own.foresight
        self.longest_result = longest_head(self.shards) + sum(map(self._number_bytes, range(self.shards)))
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
        moves = list(self.own.moves_of(payload))
        return [
            b"".join(
                of_plane.rows(rows_of(plane, shard, self.shards)).written()
                for plane, of_plane in zip(self.layout.planes, moves, strict=True)
            )
            for shard in range(self.shards)
        ]

    def check_slice(self, shard: int, data: bytes) -> None:
        self.own.check(data, self.rows(shard))

    def reduce(self, slices: Mapping[int, Mapping[Contributor, bytes]]) -> bytes:
        table = Table({shard: frozenset(given) for shard, given in slices.items() if given})
        sums = b"".join(self._sums(shard, slices[shard]) for shard in sorted(table.shards))
        return head_of(table, sums) + sums

    def follows(self, result: bytes, shard: int, slices: Mapping[Contributor, bytes]) -> bool:
        table, sums = self._read(result)
        start = sum(self._number_bytes(other) for other in table.shards if other < shard)
        try:
            for data in slices.values():
                self.check_slice(shard, data)
            made = self._sums(shard, slices)
        except ContributionError:
            return False
        return sums[start : start + self._number_bytes(shard)] == made

    def _sums(self, shard: int, slices: Mapping[Contributor, bytes]) -> bytes:
        """What a result says of a shard. ContributionError."""
        rows, parts = self.rows(shard), []
        contributions = [list(self.own.moves_of(data, rows)) for data in slices.values()]
        for plane in range(len(self.layout.planes)):
            sum_CM = sum_of([moves[plane] for moves in contributions])
            parts.append(Numbers.of(sum_CM, len(contributions)).written())
        return b"".join(parts)

    def head(self, result: bytes) -> tuple[Table, int]:
        return read_head(result, self.shards)

    def table(self, result: bytes) -> Table:
        return self._read(result)[0]

    def _read(self, result: bytes) -> tuple[Table, memoryview]:
        table, sums = read_result(result, self.shards)
        if len(sums) != sum(map(self._number_bytes, table.shards)):
            raise ContributionError(f"sums of {len(sums)} bytes, which the result's table does not fit")
        return table, sums

    def check(self, payload: bytes) -> None:
        for _ in self.numbers_of(payload):
            pass

    def tally(self, round: int) -> ResultTally:
        return ResultTally(self, round)

    def numbers_of(self, result: bytes) -> Iterator[tuple[int, list[Numbers]]]:
        """Of each shard in it, of each plane. ContributionError."""
        table, sums = self._read(result)
        start = 0
        for shard in sorted(table.shards):
            numbers = []
            for plane, count in zip(self.layout.planes, self.rows(shard), strict=True):
                width = self.own.width(plane)
                size = _numbers_bytes(count, width)
                numbers.append(Numbers.read(sums[start : start + size], count, width, self.device))
                start += size
            yield shard, numbers

    def rows(self, shard: int) -> list[int]:
        """How many chunks of each plane a shard has."""
        return [_count(rows_of(plane, shard, self.shards)) for plane in self.layout.planes]

    def _number_bytes(self, shard: int) -> int:
        return sum(
            _numbers_bytes(count, self.own.width(plane))
            for plane, count in zip(self.layout.planes, self.rows(shard), strict=True)
        )


@dataclass(frozen=True, slots=True)
class Numbers:
    """The mean that a result says of the chunks of one plane that are in one shard."""

    exponents: Tensor
    """int32 [C, 1]: of 2, in units."""
    levels: Tensor
    """int8 [C, M]: -7 to 7."""

    @classmethod
    def of(cls, sum_CM: Tensor, count: int) -> Numbers:
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

    def rows(self, rows: slice) -> Numbers:
        return Numbers(self.exponents[rows], self.levels[rows])

    def written(self) -> bytes:
        nibbles = (self.levels.cpu().numpy() + np.int8(MOST + 1)).view(np.uint8)
        return exponents.written(self.exponents) + nibbles_written(nibbles)

    @classmethod
    def read(cls, data: memoryview, count: int, width: int, device: torch.device) -> Numbers:
        """ContributionError where `data` is nothing that `written` gives."""
        exponents_C = exponents.read(data, count, LARGEST_EXPONENT)
        nibbles = nibbles_read(data[count:], count * width)
        if nibbles.min(initial=MOST) < 1:
            raise ContributionError("four bits of a result that say nothing")
        levels = (nibbles.astype(np.int8) - np.int8(MOST + 1)).reshape(count, width)
        return cls(exponents.tensor_of(exponents_C, device), torch.from_numpy(levels).to(device))


@dataclass(frozen=True, slots=True)
class _Said:
    """By one result, of some chunks of a plane."""

    rows: slice
    numbers: Numbers
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
        said: list[list[_Said]] = [[] for _ in method.layout.planes]
        for peer, (payload, _) in self._results.items():
            for shard, numbers in method.numbers_of(payload):
                if peer not in counted[shard]:
                    continue
                alone = len(counted[shard]) == 1  # Then its mean is the mean, and a small number.
                weight = 1 if alone else len(tables[peer].shards[shard])
                for plane, of_plane, so_far in zip(method.layout.planes, numbers, said, strict=True):
                    so_far.append(_Said(rows_of(plane, shard, method.shards), of_plane, weight))
        sums = {}
        for tile in all_tiles(method.layout) if self._results else ():
            sum_CM = torch.zeros(
                tile.chunks, method.own.width(tile.plane), dtype=torch.int64, device=method.device
            )
            counts_C1 = torch.zeros_like(sum_CM[:, :1])
            for each in said[tile.number]:
                each.add_to(sum_CM, counts_C1, tile)
            sums[tile.start] = packed(sum_CM, counts_C1.clamp_(min=1))
        return PartStep(method.own, self._round, sums)

    def concord(self, me: PeerId) -> None:
        """Sizes are no votes."""


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _numbers_bytes(count: int, width: int) -> int:
    """Of `Numbers` of so many chunks."""
    return count + packed_bytes(count, BITS * width)
