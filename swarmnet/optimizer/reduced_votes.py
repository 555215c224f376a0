"""Votes of `sign-muon` with sharded reduction: a few reducers count the votes and publish the counts.

The chunks of every plane are divided into `sync.shards` shards. A contribution is cut into one slice per
shard. The reducer of a shard counts for each number how many of its contributors vote negative. A count of k
contributors takes the bits of k: two for three contributors, four for fifteen. Counts are exact, so a round
whose contributors are all in its results makes the same step as without reducers.

Shapes: C chunks of a plane or of a shard of it, M numbers of a chunk that a round covers, B bits of a count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.model.flat_layout import Layout, Plane
from swarmnet.optimizer.index_code import ContributionError, pack, packed_bytes, unpack
from swarmnet.optimizer.result_parts import ResultParts, ResultTally
from swarmnet.optimizer.sign_muon import SignMuon
from swarmnet.optimizer.step import SignStep
from swarmnet.optimizer.tiling import plane_of, rows_of
from swarmnet.rounds.result_table import MAX_CONTRIBUTORS, Contributor, longest_head
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE

Counts = NDArray[np.uint16]
"""Numbers of negative votes [C, M]."""


class ReducedVotes(ResultParts):
    """Sync method `sign-muon` with sharded reduction, for one peer and one stage."""

    own = held = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self.votes_method = SignMuon(manifest, layout, device)
        super().__init__(manifest=manifest, device=device, maker=self.votes_method)
        self.voted = self.votes_method.voted
        self.slice_bytes = [self._bytes(shard, 1) for shard in range(self.shards)]
        self.longest_result = longest_head(self.shards) + self.all_sums_bytes(MAX_CONTRIBUTORS)

    @property
    def momentum(self) -> Tensor:
        return self.votes_method.momentum

    @property
    def reduced(self) -> ReducedVotes:
        return self

    def all_sums_bytes(self, contributors: int) -> int:
        return sum(self._bytes(shard, contributors) for shard in range(self.shards))

    def slices(self, payload: bytes) -> list[bytes]:
        by_plane = [(votes.signs < 0).numpy().view(np.uint8) for votes in self.votes_method.votes_of(payload)]
        return [
            b"".join(
                pack(bits_CM[rows]) for bits_CM, (_, rows) in zip(by_plane, self._rows(shard), strict=True)
            )
            for shard in range(self.shards)
        ]

    def check_slice(self, shard: int, data: bytes) -> None:
        self._counts(shard, 1, memoryview(data))

    def sums(self, shard: int, slices: Mapping[Contributor, bytes]) -> bytes:
        by_slice = [self._counts(shard, 1, memoryview(data)) for data in slices.values()]
        totals: list[Counts] = [sum(of_plane[1:], of_plane[0]) for of_plane in zip(*by_slice, strict=True)]
        return b"".join(pack(to_bits(total_CM, len(slices))) for total_CM in totals)

    def sums_bytes(self, shard: int, contributors: int, sums: memoryview) -> int:
        return self._bytes(shard, contributors)

    def check(self, payload: bytes) -> None:
        for _ in self.sums_of(payload):
            pass

    def tally(self, round: int) -> CountTally:
        return CountTally(self, round)

    def sums_of(self, result: bytes) -> Iterator[tuple[int, list[tuple[Plane, slice, Tensor]]]]:
        """Yield each shard in a result with the sums of its votes: the plane of the votes, its chunks, and
        int16 [C, M]. Raises ContributionError."""
        table, parts = self.parts_of(result)
        for shard, part in parts.items():
            voters = len(table.shards[shard])
            counts = self._counts(shard, voters, part)
            sums = [torch.from_numpy(voters - 2 * count_CM.astype(np.int16)) for count_CM in counts]
            cut = zip(self._rows(shard), sums, strict=True)
            yield shard, [(plane, rows, sum_CM) for (plane, rows), sum_CM in cut]

    def _rows(self, shard: int) -> list[tuple[Plane, slice]]:
        """Return each plane of the votes with its chunks in a shard."""
        return [(plane, rows_of(plane, shard, self.shards)) for plane in self.voted.planes]

    def _bytes(self, shard: int, most: int) -> int:
        """Return the bytes of the counts of a shard, each of which is `most` or less."""
        bits = most.bit_length()
        cut = self._rows(shard)
        return sum(packed_bytes(rows.stop - rows.start, bits * plane.chunk) for plane, rows in cut)

    def _counts(self, shard: int, most: int, data: memoryview) -> list[Counts]:
        """Decode the counts of each plane in a shard, each of which is `most` or less. A slice is the counts
        of one contributor. Raises ContributionError."""
        size, bits = self._bytes(shard, most), most.bit_length()
        if len(data) != size:
            raise ContributionError(f"{len(data)} bytes of votes in shard {shard} where {size} belong")
        start, found = 0, []
        for plane, rows in self._rows(shard):
            chunks = rows.stop - rows.start
            stop = start + packed_bytes(chunks, bits * plane.chunk)
            count_CM = _from_bits(unpack(data[start:stop], chunks, bits * plane.chunk), bits)
            if count_CM.max(initial=0) > most:
                raise ContributionError(f"a count of {count_CM.max()} votes where {most} is the most")
            found.append(count_CM)
            start = stop
        return found


class CountTally(ResultTally):
    """The results of one round. They are combined when a step is requested."""

    def __init__(self, method: ReducedVotes, round: int) -> None:
        super().__init__(method, round)
        self._method = method

    def step(self, factor: int = WHOLE) -> SignStep:
        method = self._method
        sums = torch.zeros(method.voted.size, dtype=torch.int16, device=method.device)
        for payload, counted in self._counted():
            for shard, of_planes in method.sums_of(payload):
                if shard in counted:
                    for plane, rows, sum_CM in of_planes:
                        plane_of(sums, plane)[rows] += sum_CM.to(method.device)
        return method.votes_method.step_of(torch.sign(sums).to(torch.int8), self._round, factor)


def to_bits(counts_CM: Counts, most: int) -> NDArray[np.uint8]:
    """Return the bits of counts, each of which is `most` or less, lowest first, [C, M * B]."""
    bits_B = np.arange(most.bit_length(), dtype=np.uint16)
    bits_CMB = (counts_CM[:, :, None] >> bits_B & 1).astype(np.uint8)
    return bits_CMB.reshape(len(counts_CM), counts_CM.shape[1] * len(bits_B))


def _from_bits(bits: NDArray[np.uint8], width: int) -> Counts:
    """Return the counts [C, M] from bits [C, M * B]."""
    bits_CMB = bits.reshape(len(bits), bits.shape[1] // width, width).astype(np.uint16)
    counts_CM: Counts = (bits_CMB << np.arange(width, dtype=np.uint16)).sum(axis=2, dtype=np.uint16)
    return counts_CM
