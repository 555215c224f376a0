"""Expert groups with sharded reduction: a slice names its group, and a result has a mean for each group.

    slice      group u8 | its chunks of the shared planes | its chunks of that group's planes
    of a shard groups u8, of each contributor in the table's order | mean of the shared planes
               | of each of these groups, in order, the mean of its planes

All of it is a function of the shard's slices alone, so any peer that has them can verify it. A result also
shows which peer trains which group, as contributions do with `topology: all-gather` (`expert_steps.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.device_groups.device_group import ALONE
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.local_steps.reduced_steps import MeanTally, ReducedSteps, ShardedPart, ShardMean
from swarmnet.optimizer.result_parts import ResultParts
from swarmnet.rounds.result_table import MAX_CONTRIBUTORS, Contributor, longest_head, tag_of
from swarmnet.run.manifest import Manifest


class ReducedExperts(ReducedSteps):
    """The sync method for one peer and one stage. Its local steps are those of `ExpertShardSteps`."""

    held: ExpertShardSteps

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self.own = ExpertShardSteps(manifest, layout, device, name_of=_named_in_tables)
        self.held = self.own
        ResultParts.__init__(self, manifest=manifest, device=device, maker=self.held)
        self.layout = layout
        self.planes = ALONE.planes(layout)
        shards = self.shards
        self._shared = ShardedPart(self.held.shared, shards, self.held.shared.layout.planes)
        self._of_group = ShardedPart(self.held.of_group, shards, self.held.of_group.layout.planes)
        both = list(zip(self._shared.slice_bytes, self._of_group.slice_bytes, strict=True))
        self.slice_bytes = [1 + shared + experts for shared, experts in both]
        of_experts = self.held.groups * sum(self._of_group.number_bytes)
        self.number_bytes = sum(self._shared.number_bytes) + of_experts
        self.longest_result = longest_head(shards) + shards * MAX_CONTRIBUTORS + self.number_bytes

    @property
    def _experts(self) -> ShardedPart:
        """The shards of expert planes. All groups have the same layout, so the decoder of the peer's own
        group reads every group."""
        if self._of_group.said is not self.held.of_group:
            of_group = self.held.of_group
            self._of_group = ShardedPart(of_group, self.shards, of_group.layout.planes)
        return self._of_group

    def slices(self, payload: bytes) -> list[bytes]:
        group, shared, experts = self.held.cut(payload)
        both = zip(self._shared.slices(shared), self._experts.slices(experts), strict=True)
        return [bytes([group]) + of_shared + of_experts for of_shared, of_experts in both]

    def check_slice(self, shard: int, data: bytes) -> None:
        _, shared, experts = self._cut_slice(shard, data)
        self._shared.check(shard, shared)
        self._experts.check(shard, experts)

    def sums(self, shard: int, slices: Mapping[Contributor, bytes]) -> bytes:
        cut = [self._cut_slice(shard, slices[contributor]) for contributor in sorted(slices)]
        groups = bytes(group for group, _, _ in cut)
        means = [self._shared.mean(shard, [shared for _, shared, _ in cut])]
        for group in sorted(set(groups)):
            means.append(self._experts.mean(shard, [experts for one, _, experts in cut if one == group]))
        return groups + b"".join(means)

    def sums_bytes(self, shard: int, contributors: int, sums: memoryview) -> int:
        of_experts = len(set(self._groups(contributors, sums))) * self._experts.number_bytes[shard]
        return contributors + self._shared.number_bytes[shard] + of_experts

    def encode_mean(self, shard: int, contributors: int, sums: memoryview) -> Iterator[ShardMean]:
        groups = self._groups(contributors, sums)
        start = contributors + self._shared.number_bytes[shard]
        shared = self._shared.numbers(shard, sums[contributors:start])
        for plane, numbers in zip(self.held.numbers_of(None), shared, strict=True):
            yield ShardMean(plane, numbers, contributors)
        for group in sorted(set(groups)):
            stop = start + self._experts.number_bytes[shard]
            experts = self._experts.numbers(shard, sums[start:stop])
            for plane, numbers in zip(self.held.numbers_of(group), experts, strict=True):
                yield ShardMean(plane, numbers, groups.count(group))
            start = stop

    def holding_in(self, result: bytes) -> dict[str, int]:
        """Return the group of each contributor's slices, by its name in tables. Raises ContributionError.

        A dishonest contributor may have slices of several groups; then that of the first shard is returned.
        """
        table, sums = self.parts_of(result)
        found: dict[str, int] = {}
        for shard, encoded in sums.items():
            contributors = sorted(table.shards[shard])
            for one, group in zip(contributors, self._groups(len(contributors), encoded), strict=True):
                found.setdefault(one.peer.hex(), group)
        return found

    def tally(self, round: int) -> ExpertResultTally:
        return ExpertResultTally(self, round)

    def _cut_slice(self, shard: int, data: bytes) -> tuple[int, bytes, bytes]:
        """Return the group of a slice, and its encoded deltas of the shared planes and of the group. Raises
        ContributionError."""
        if len(data) != self.slice_bytes[shard]:
            raise ContributionError(f"slice of {len(data)} bytes where {self.slice_bytes[shard]} belong")
        self._groups(1, memoryview(data))
        stop = 1 + self._shared.slice_bytes[shard]
        return data[0], data[1:stop], data[stop:]

    def _groups(self, contributors: int, sums: memoryview) -> bytes:
        """Return the groups at the start of a shard's part of a result, one per contributor. Raises
        ContributionError."""
        groups = bytes(sums[:contributors])
        if len(groups) < contributors or max(groups, default=0) >= self.held.groups:
            raise ContributionError(f"unknown expert group; the run has {self.held.groups}")
        return groups


class ExpertResultTally(MeanTally):
    """The results of one round, which also record the assignment of groups."""

    def __init__(self, method: ReducedExperts, round: int) -> None:
        super().__init__(method, round)
        self._experts = method

    def add(self, peer: PeerId, payload: bytes) -> None:
        super().add(peer, payload)
        self._experts.held.trainers.record(self._round, peer, self._experts.holding_in(payload))

    def remove(self, peer: PeerId) -> None:
        super().remove(peer)
        self._experts.held.trainers.record(self._round, peer, None)


def _named_in_tables(peer: PeerId) -> str:
    return tag_of(peer).hex()
