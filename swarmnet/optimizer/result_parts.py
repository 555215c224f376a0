"""What all methods with sharded reduction share: a result is a table of contributors, and the sums of each
shard in it, one after the other. What sums are, and what a round's step is, differs between methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set

import torch

from swarmnet.identifiers import PeerId
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.local_steps.local_steps import LocalSteps
from swarmnet.optimizer.sign_muon import SignMuon
from swarmnet.optimizer.step import ContributionTally
from swarmnet.rounds.result_table import (
    ContributionError,
    Contributor,
    Table,
    counting,
    draw_of,
    head_of,
    read_head,
    read_result,
)
from swarmnet.run.manifest import Manifest


class ResultParts(ABC):
    """A sync method with sharded reduction, for one peer and one stage. Contributions are made by another
    method. This one combines the sums of shards to results, and checks results."""

    def __init__(
        self, *, manifest: Manifest, device: torch.device, maker: LocalSteps | ExpertShardSteps | SignMuon
    ) -> None:
        """`maker` makes the contributions."""
        self._maker = maker
        self.device = device
        self.shards = manifest.sync.shards
        """Number of shards of a contribution."""
        self.draw = draw_of(manifest)
        self.state = maker.state
        self.lookahead_accuracy = maker.lookahead_accuracy
        self.contribute = maker.contribute
        self.lookahead = maker.lookahead
        self.give_back = maker.give_back

    @property
    def payload_bytes(self) -> int:
        return self._maker.payload_bytes

    @property
    def gradient_norm(self) -> float | None:
        return self._maker.gradient_norm

    @property
    def momentum_norm(self) -> float | None:
        return self._maker.momentum_norm

    @abstractmethod
    def all_sums_bytes(self, contributors: int) -> int:
        """Return the bytes of the sums of all shards of a round, each of which has so many contributors."""

    @abstractmethod
    def check(self, payload: bytes) -> None:
        """Raise ContributionError, with the reason, if no honest reducer can have sent `payload`."""

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


class ResultTally(ContributionTally[tuple[bytes, Table]]):
    """The results of one round. Subclasses combine them when a step is requested."""

    def __init__(self, method: ResultParts, round: int) -> None:
        super().__init__(round)
        self._reduced = method

    def _checked(self, peer: PeerId, payload: bytes) -> tuple[bytes, Table]:
        self._reduced.check(payload)
        return payload, self._reduced.head(payload)[0]

    @property
    def contributors(self) -> int:
        """Number of peers in the largest shard of a result."""
        return max(
            (len(peers) for _, table in self._kept.values() for peers in table.shards.values()), default=0
        )

    def _members(self) -> Mapping[PeerId, tuple[bytes, Table]]:
        """Return the results that may count."""
        return self._kept

    def _counted(self) -> Iterator[tuple[bytes, Set[int]]]:
        """Yield each result with the shards in which it counts."""
        members = self._members()
        tables = {peer: table for peer, (_, table) in members.items()}
        counted = counting(tables, self._reduced.draw, self._round)
        for peer, (payload, table) in members.items():
            yield payload, {shard for shard in table.shards if peer in counted[shard]}
