"""The parts of a reducer's result: the sums of each shard in its table, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from swarmnet.rounds.result_table import (
    ContributionError,
    Contributor,
    Table,
    head_of,
    read_head,
    read_result,
)


class ResultParts(ABC):
    """Combines the sums of shards to results, and checks results. Subclasses define what sums are."""

    shards: int
    """Number of shards of a contribution."""

    @abstractmethod
    def check_slice(self, shard: int, data: bytes) -> None:
        """Raise ContributionError, with the reason, if no honest peer can have sent `data`."""

    @abstractmethod
    def sums(self, shard: int, slices: Mapping[Contributor, bytes]) -> bytes:
        """Return what a result contains for a shard. It does not depend on the order of the slices. Raises
        ContributionError."""

    @abstractmethod
    def sums_bytes(self, shard: int, contributors: int, sums: memoryview) -> int:
        """Return the length of a shard's part of a result, at the start of `sums`. Raises
        ContributionError."""

    def reduce(self, slices: Mapping[int, Mapping[Contributor, bytes]]) -> bytes:
        table = Table({shard: frozenset(given) for shard, given in slices.items() if given})
        sums = b"".join(self.sums(shard, slices[shard]) for shard in sorted(table.shards))
        return head_of(table, sums) + sums

    def follows(self, result: bytes, shard: int, slices: Mapping[Contributor, bytes]) -> bool:
        published = self.parts_of(result)[1][shard]
        try:
            for data in slices.values():
                self.check_slice(shard, data)
            expected = self.sums(shard, slices)
        except ContributionError:
            return False
        return published == expected

    def head(self, result: bytes) -> tuple[Table, int]:
        return read_head(result, self.shards)

    def table(self, result: bytes) -> Table:
        return self.parts_of(result)[0]

    def parts_of(self, result: bytes) -> tuple[Table, dict[int, memoryview]]:
        """Return a result's table, and its part for each of its shards. Raises ContributionError."""
        table, sums = read_result(result, self.shards)
        start, found = 0, {}
        for shard in sorted(table.shards):
            size = self.sums_bytes(shard, len(table.shards[shard]), sums[start:])
            found[shard] = sums[start : start + size]
            start += size
        if len(sums) != start:
            raise ContributionError(
                f"the result has {len(sums)} bytes of sums where its table requires {start}"
            )
        return table, found
