"""Votes through reducers, each with the weight of its contributor.

A reducer sees all votes of its shard. It weighs them by the ledger that it has settled, compares their
contributors, and publishes weights and comparison with the sums. All follow from the slices and the weights,
so the audits of results check them. For each shard, a result has:

    for each contributor, in the order of the table: weight u8 | shared u16 | ratio i16    (little-endian)
    sums of the weights of negative votes, as counts up to the sum of all weights; nothing if that is 0

Weights are those of the ledger after one of the last `HISTORY` rounds. When a round settles, all peers know
these ledgers, and leave out results with other weights. The round adds the ratios to the ledger: of each
contributor the lower median over its shards, so that one false reducer has little effect.

Shapes: C chunks of a shard, M numbers of a chunk that a round covers, W contributors.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from statistics import median_low

import numpy as np
import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout, Plane
from swarmnet.optimizer.agreement.comparison import MAX_RATIO, RATIO, RoundAgreement, compare
from swarmnet.optimizer.agreement.ledger import HISTORY, AgreementLedger, counted
from swarmnet.optimizer.agreement.weighed_tally import drawn_places
from swarmnet.optimizer.agreement.weight_report import FULL_WEIGHT, NEWCOMER
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.reduced_votes import Counts, CountTally, ReducedVotes, count_code
from swarmnet.rounds.result_table import Contributor, Table
from swarmnet.run.manifest import Manifest

_ROW = struct.Struct("<BHh")
NOT_COMPARED = -(1 << 15)
"""In the place of ratios: the votes of a shard say nothing of their contributors."""
Rows = Sequence[tuple[int, int, int]]
"""Weight or `NEWCOMER`, shared and ratio of each contributor of a shard."""


class WeighedVotes(ReducedVotes):
    """Sync method `sign-muon` with sharded reduction and weights by agreement, for one peer and one stage."""

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        super().__init__(manifest, layout, device)
        self.ledger = AgreementLedger(is_private=manifest.data.private)

    def all_sums_bytes(self, contributors: int) -> int:
        sums = super().all_sums_bytes(FULL_WEIGHT * contributors)
        return sums + self.shards * contributors * _ROW.size

    def sums(self, shard: int, slices: Mapping[Contributor, bytes]) -> bytes:
        return self._weighed_sums(shard, slices, self.ledger.marks(0, [each.peer for each in sorted(slices)]))

    def follows(self, result: bytes, shard: int, slices: Mapping[Contributor, bytes]) -> bool:
        published = self.parts_of(result)[1][shard]
        marks = [row[0] for row in _read_rows(published, len(self.table(result).shards[shard]))]
        try:
            for data in slices.values():
                self.check_slice(shard, data)
            return len(marks) == len(slices) and published == self._weighed_sums(shard, slices, marks)
        except ContributionError:
            return False

    def sums_bytes(self, shard: int, contributors: int, sums: memoryview) -> int:
        shares, _ = _shares([row[0] for row in _read_rows(sums, contributors)])
        return contributors * _ROW.size + (self._bytes(shard, sum(shares)) if any(shares) else 0)

    def tally(self, round: int) -> WeighedCountTally:
        return WeighedCountTally(self, round)

    def rows_of(self, result: bytes) -> dict[int, Rows]:
        """Return what a checked result says of the contributors of each shard, in the order of its table."""
        table, parts = self.parts_of(result)
        return {shard: _read_rows(part, len(table.shards[shard])) for shard, part in parts.items()}

    def sums_of(self, result: bytes) -> Iterator[tuple[int, list[tuple[Plane, slice, Tensor]]]]:
        table, parts = self.parts_of(result)
        for shard, part in parts.items():
            contributors = len(table.shards[shard])
            shares, unit = _shares([row[0] for row in _read_rows(part, contributors)])
            if not any(shares):
                continue
            counts = self._counts(shard, sum(shares), part[contributors * _ROW.size :])
            sums = [torch.from_numpy(unit * (sum(shares) - 2 * each.astype(np.int16))) for each in counts]
            cut = zip(self._rows(shard), sums, strict=True)
            yield shard, [(plane, rows, sum_CM) for (plane, rows), sum_CM in cut]

    def _weighed_sums(self, shard: int, slices: Mapping[Contributor, bytes], marks: Sequence[int]) -> bytes:
        """Return a shard's part of a result. `marks` has the weight of each contributor, in their order."""
        contributors = sorted(slices)
        votes = [self._counts(shard, 1, memoryview(slices[each])) for each in contributors]
        shares, _ = _shares(marks)
        weighed = [[share * bits_CM for bits_CM in cut] for share, cut in zip(shares, votes, strict=True)]
        totals: list[Counts] = [sum(of_plane[1:], of_plane[0]) for of_plane in zip(*weighed, strict=True)]
        seed = shard.to_bytes(2, "little") + b"".join(each.contribution for each in contributors)
        negative_WN = np.array([np.concatenate([bits_CM.reshape(-1) for bits_CM in cut]) for cut in votes])
        places = drawn_places(negative_WN.shape[1], len(contributors), seed)
        signs_WN = 1 - 2 * negative_WN[:, places].astype(np.int8)
        known_W = np.array(marks) != NEWCOMER
        bases_W = np.array(counted(marks), np.int64)
        found = compare(signs_WN, bases_W, known_W, is_private=self.ledger.is_private)
        if found is None:
            rows = [(mark, FULL_WEIGHT, NOT_COMPARED) for mark in marks]
        else:
            rows = list(zip(marks, found.shared.tolist(), found.ratios.tolist(), strict=True))
        head = b"".join(_ROW.pack(*row) for row in rows)
        return head + (b"".join(map(count_code(sum(shares)).write, totals)) if any(shares) else b"")


class WeighedCountTally(CountTally):
    """The results of one round. Until `weigh` is called, all count."""

    def __init__(self, method: WeighedVotes, round: int) -> None:
        super().__init__(method, round)
        self._weighed = method
        self._left_out: frozenset[PeerId] = frozenset()
        """Reducers whose results have other weights than the ledger."""
        self._has_new = False
        """Whether a result was added since the last call of `weigh`."""

    def add(self, peer: PeerId, payload: bytes) -> None:
        super().add(peer, payload)
        self._has_new = True

    def weigh(self, ahead: int) -> bool:
        has_new, self._has_new = self._has_new, False
        # Before the round is the next one to settle, a result may be by a newer ledger than this peer's.
        before, self._left_out = self._left_out, frozenset()
        if ahead == 1:
            self._left_out = frozenset(peer for peer in self._kept if not self._is_by_ledger(peer))
        return has_new or before != self._left_out

    def settle(self, chain: bytes) -> None:
        """Add the round to the ledger. The reducers have drawn the numbers that they compared, by the
        contributions, so the chain draws none."""
        found: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for payload, shards in self._counted():
            table, rows = self._weighed.head(payload)[0], self._weighed.rows_of(payload)
            for shard in shards:
                for contributor, (_, shared, ratio) in zip(
                    sorted(table.shards[shard]), rows[shard], strict=True
                ):
                    if ratio != NOT_COMPARED:
                        found[contributor.peer].append((ratio, shared))
        tags = sorted(found)
        ratios = np.array([median_low(ratio for ratio, _ in found[tag]) for tag in tags], np.int64)
        sharing = np.array([median_low(shared for _, shared in found[tag]) for tag in tags], np.int64)
        compared = RoundAgreement(np.clip(ratios, -RATIO, MAX_RATIO), np.maximum(sharing, FULL_WEIGHT))
        self._weighed.ledger.record(self._round, tags, compared if tags else None)

    def _members(self) -> dict[PeerId, tuple[bytes, Table]]:
        return {peer: result for peer, result in self._kept.items() if peer not in self._left_out}

    def _is_by_ledger(self, reducer: PeerId) -> bool:
        """Return whether the weights in a result are those of the ledger after one of the last rounds."""
        payload, table = self._kept[reducer]
        ledger = self._weighed.ledger
        for shard, rows in self._weighed.rows_of(payload).items():
            tags, marks = [each.peer for each in sorted(table.shards[shard])], [row[0] for row in rows]
            if all(ledger.marks(age, tags) != marks for age in range(HISTORY)):
                return False
        return True


def _read_rows(data: memoryview, contributors: int) -> Rows:
    """Read the rows at the start of a shard's part of a result. Raises ContributionError."""
    size = contributors * _ROW.size
    if len(data) < size:
        raise ContributionError(f"{len(data)} bytes where weights of {contributors} contributors take {size}")
    rows = list(_ROW.iter_unpack(data[:size]))
    for mark, _, _ in rows:
        if mark != NEWCOMER and mark > FULL_WEIGHT:
            raise ContributionError(f"a weight of {mark}: a vote weighs {FULL_WEIGHT} at most")
    return rows


def _shares(marks: Sequence[int]) -> tuple[list[int], int]:
    """Return the weights that sums are made with, and the weight that 1 of them stands for. They are as small
    as their ratios allow: all 1 if all votes count in full."""
    weights = counted(marks)
    unit = gcd(*weights) or 1
    return [weight // unit for weight in weights], unit
