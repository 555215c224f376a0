"""Votes of `sign-muon` with sharded reduction: a few reducers count the votes and publish the counts.

The chunks of every plane are divided into `sync.shards` shards. A contribution is cut into one slice per
shard. The reducer of a shard counts for each number how many of its contributors vote negative. Counts are
exact, so a round whose contributors are all in its results makes the same step as without reducers.

A count of k contributors is a digit in base k + 1, and words of up to eight bytes hold some digits each. Bits
of its own would take a quarter more for eight contributors, and ten times as long to read.

Shapes: C chunks of a plane or of a shard of it, M numbers of a chunk that a round covers, W words, D digits
of a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.model.flat_layout import Layout, Plane
from swarmnet.optimizer.device_groups.device_group import DeviceGroup
from swarmnet.optimizer.device_groups.payload import Sections
from swarmnet.optimizer.index_code import ContributionError, pack
from swarmnet.optimizer.result_parts import ResultParts, ResultTally
from swarmnet.optimizer.sign_muon import SignMuon
from swarmnet.optimizer.step import SignStep
from swarmnet.optimizer.tiling import plane_of, rows_of
from swarmnet.rounds.result_table import MAX_CONTRIBUTORS, Contributor, longest_head
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE

Counts = NDArray[np.uint16]
"""Numbers of negative votes [C, M]."""
WORD_BYTES = 8
"""Longest word, which numpy divides at once."""


@dataclass(frozen=True, slots=True)
class CountCode:
    """Code for counts from 0 to `most`. Any counts have one form, and `read` refuses all others."""

    most: int
    word_bytes: int
    digits: int
    """Counts in a word, the first lowest. The last word may have fewer, and then zeros."""

    def bytes_of(self, count: int) -> int:
        """Return the encoded bytes of so many counts."""
        return -(-count // self.digits) * self.word_bytes

    def write(self, counts_CM: Counts) -> bytes:
        flat = counts_CM.reshape(-1)
        digits_WD = np.zeros((-(-len(flat) // self.digits), self.digits), np.uint64)
        digits_WD.reshape(-1)[: len(flat)] = flat
        words_W = np.zeros(len(digits_WD), "<u8")
        for digit_W in digits_WD.T[::-1]:
            words_W *= np.uint64(self.most + 1)
            words_W += digit_W
        return words_W.view(np.uint8).reshape(-1, WORD_BYTES)[:, : self.word_bytes].tobytes()

    def read(self, data: memoryview, chunks: int, width: int) -> Counts:
        """Return counts [chunks, width]. Raises ContributionError if `write` cannot have returned `data`."""
        count, base = chunks * width, np.uint64(self.most + 1)
        if len(data) != self.bytes_of(count):
            raise ContributionError(f"{len(data)} bytes of counts where {self.bytes_of(count)} belong")
        bytes_WB = np.frombuffer(data, np.uint8).reshape(-1, self.word_bytes)
        words_W = np.pad(bytes_WB, ((0, 0), (0, WORD_BYTES - self.word_bytes))).view("<u8").reshape(-1)
        digits_WD = np.empty((len(words_W), self.digits), np.uint16)
        for place in range(self.digits):
            rest_W = words_W // base
            digits_WD[:, place] = words_W - rest_W * base
            words_W = rest_W
        flat = digits_WD.reshape(-1)
        if np.any(words_W) or np.any(flat[count:]):
            raise ContributionError(f"a word of counts is too large for counts up to {self.most}")
        return flat[:count].reshape(chunks, width)


@lru_cache(MAX_CONTRIBUTORS)
def count_code(most: int) -> CountCode:
    """Return the code of counts up to `most` with the fewest bytes for each, then the shortest words."""
    codes = []
    for word_bytes in range(1, WORD_BYTES + 1):
        digits = 0
        while (most + 1) ** (digits + 1) <= 256**word_bytes:
            digits += 1
        if digits:
            codes.append(CountCode(most, word_bytes, digits))
    return min(codes, key=lambda code: Fraction(code.word_bytes, code.digits))


class ReducedVotes(ResultParts):
    """Sync method `sign-muon` with sharded reduction, for one peer and one stage."""

    own = held = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self.votes_method = SignMuon(manifest, layout, device)
        super().__init__(manifest=manifest, device=device, maker=self.votes_method)
        self.sections: Sections = ()
        self._measure()

    def use_device_group(self, company: DeviceGroup) -> None:
        """Use collectives of several devices. Each counts all votes, and steps by those of its weights."""
        self.votes_method.use_device_group(company)
        self._measure()

    def _measure(self) -> None:
        """Measure slices and results by the votes of the whole stage."""
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
        code = count_code(len(slices))
        return b"".join(map(code.write, totals))

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
        code = count_code(most)
        return sum(code.bytes_of((rows.stop - rows.start) * plane.chunk) for plane, rows in self._rows(shard))

    def _counts(self, shard: int, most: int, data: memoryview) -> list[Counts]:
        """Decode the counts of each plane in a shard, each of which is `most` or less. A slice is the counts
        of one contributor. Raises ContributionError."""
        size, code = self._bytes(shard, most), count_code(most)
        if len(data) != size:
            raise ContributionError(f"{len(data)} bytes of votes in shard {shard} where {size} belong")
        start, found = 0, []
        for plane, rows in self._rows(shard):
            chunks = rows.stop - rows.start
            stop = start + code.bytes_of(chunks * plane.chunk)
            found.append(code.read(data[start:stop], chunks, plane.chunk))
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
