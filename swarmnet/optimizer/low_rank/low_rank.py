"""Sync methods `low-rank` and `hybrid`: send the momentum of each layer matrix in a few directions.

    P = M Q,  step = orthogonal(sum of P) Q^T

The projection is that of PowerSGD (arXiv:1905.13727, algorithm 1). The orthogonal step is that of Dion
(arXiv:2504.05295, algorithm 1). Both derive Q from the round before by a second exchange. Here all peers draw
it (`subspace.py`). The contribution is then linear in the momentum and one message. A round's step is a
function of its set alone, exact to the bit (`exact.py`).

With `low-rank`, the sent part stays in the momentum and decays there, as in Muon. The rest stays in it until
its directions are drawn (docs/decisions/0026-low-rank.md). Parameters that are no layer matrices use votes
(`sign_votes.py`).

With `hybrid`, votes cover all parameters. For matrices they cover what the directions left over: both share
one momentum and remove in turn what they send.

Shapes: R rows and C columns of a matrix; L its longer side, M its shorter, K directions of the longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod, sqrt

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Entry, Layout
from swarmnet.model.parameters import trains_with_muon
from swarmnet.optimizer.device_groups.device_group import ALONE, DeviceGroup
from swarmnet.optimizer.device_groups.payload import Sections, gather, own_part
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.low_rank.exact import TOLD_BITS, orthogonal, spread
from swarmnet.optimizer.low_rank.factor import Factor, bytes_of, sum_of
from swarmnet.optimizer.low_rank.momenta import Apart, Chained, Momenta
from swarmnet.optimizer.low_rank.subspace import Subspace, subspace
from swarmnet.optimizer.mean_gradient import BlockClip
from swarmnet.optimizer.sign_votes import VoteSizes, VoteTally
from swarmnet.optimizer.step import ContributionTally, SignStep, rate_units
from swarmnet.optimizer.tiling import Tile
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE
from swarmnet.run.sync_methods import LowRankConfig

MATRIX_RMS = 0.4
"""Root mean square of a matrix's step, in learning rates. Votes step by 1, so one rate serves both."""


class LowRank:
    """The optimizer of one peer for one stage."""

    own = held = reduced = None
    lookahead_accuracy = 0.75
    """The value of votes: the factors of a round are sent exactly."""

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self._manifest = manifest
        self._run_id = manifest.run_id()
        self.device = device
        self.state = layout
        self._clip = BlockClip(layout, manifest.sync.max_grad_norm, device)
        self._most = manifest.sync.max_grad_norm
        self._layout = layout
        self._last: tuple[int, list[Factor]] | None = None
        self.sections: Sections = ()
        """Empty: every device makes and takes whole payloads."""
        self.momenta = self._divide(ALONE)

    def use_device_group(self, company: DeviceGroup) -> None:
        """Use collectives of several devices. Each has its shard of every momentum. Matrices are gathered one
        by one for their factors, and the votes of all devices are joined."""
        self._clip.device_group = company
        del self.momenta  # Memory may not suffice for both.
        self.momenta = self._divide(company)

    def _divide(self, group: DeviceGroup) -> Momenta:
        """Lay out contributions for the devices of a group. Returns this device's empty momenta."""
        config = self._manifest.sync.config
        self.group = group
        self.matrices = [
            entry for entry in self._layout.entries if trains_with_muon(entry.name, group.shape(entry))
        ]
        self._shapes = [(min(group.shape(entry)), self._columns(entry)) for entry in self.matrices]
        kind = Chained if isinstance(config, LowRankConfig) and config.votes_on_matrices else Apart
        momenta = kind(
            manifest=self._manifest,
            layout=self._layout,
            matrices=self.matrices,
            device=self.device,
            group=group,
        )
        whole = VoteSizes.from_layout(self._manifest.sync, momenta.voted)
        self._vote_sections = whole.sections
        self.payload_bytes = sum(map(bytes_of, self._shapes)) + whole.payload_bytes
        return momenta

    @property
    def gradient_norm(self) -> float | None:
        return self._clip.norm

    @property
    def momentum_norm(self) -> float | None:
        return self.momenta.norm()

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        gains = self._clip.block_gains(gradient, tokens)
        weight = min(1.0, tokens / self._manifest.rounds.global_batch_tokens)
        self.momenta.accumulate(gradient, tokens, gains, weight)
        factors = self._factors(round)
        self._add_to_momentum(factors, round, -1.0)
        self._last = round, factors
        told = b"".join(factor.written() for factor in factors)
        votes = self.momenta.votes.vote(round, peer)
        return told + gather(votes, self._vote_sections, self.momenta.group, self.device)

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        factors, votes = self.read(payload)
        self._add_to_momentum(factors, round, 1.0)
        self.momenta.votes.give_back(votes, round, peer)

    def check(self, payload: bytes) -> None:
        self.momenta.votes.check(self.read(payload)[1])

    def tally(self, round: int) -> FactorTally:
        return FactorTally(self, round)

    def lookahead(self, round: int, factor: int = WHOLE, contributors: int = 1) -> LowRankStep:
        told = self._last[1] if self._last is not None and self._last[0] == round else self._factors(round)
        return self.step_of([told], self.momenta.votes.lookahead(round, factor), round, factor)

    def read(self, payload: bytes) -> tuple[list[Factor], bytes]:
        """Parse a payload. Returns the factor of each matrix, and this device's part of the votes. Raises
        ContributionError."""
        if len(payload) != self.payload_bytes:
            raise ContributionError(f"payload of {len(payload)} bytes where {self.payload_bytes} belong")
        factors, start, data = [], 0, memoryview(payload)
        for shape in self._shapes:
            stop = start + bytes_of(shape)
            factors.append(Factor.read(data[start:stop], shape, self.device))
            start = stop
        return factors, own_part(payload[start:], self._vote_sections, self.momenta.group)

    def step_of(self, set_: list[list[Factor]], rest: SignStep, round: int, factor: int) -> LowRankStep:
        """Return the step of a set's factors together with the step of its votes."""
        told = [orthogonal(sum_of(of_matrix)) for of_matrix in zip(*set_, strict=True)]
        rates = [rate_units(self._manifest, entry.name, round, factor) for entry in self.matrices]
        return LowRankStep(self, round, tuple(told), tuple(rates), self.momenta.placed(rest))

    def directions(self, entry: Entry, round: int) -> Subspace:
        longer = max(self.group.shape(entry))
        return subspace(self._run_id, round, longer, self._columns(entry), self.device)

    def _columns(self, entry: Entry) -> int:
        return min(self._manifest.sync.rank, *self.group.shape(entry))

    def _factors(self, round: int) -> list[Factor]:
        """Return this peer's momentum in the directions of a round."""
        factors = []
        for entry, part in zip(self.matrices, self.momenta.matrices(), strict=True):
            found, matrix_RC = self.directions(entry, round), self.group.whole(entry, part)
            factors.append(Factor.nearest(wide(matrix_RC) @ found.signs * found.scale, self._most))
        return factors

    def _add_to_momentum(self, factors: list[Factor], round: int, weight: float) -> None:
        """Add the factors' values, times `weight`, to the momentum of `hybrid`; otherwise do nothing."""
        if not isinstance(self.momenta, Chained):
            return
        changes = []
        for entry, factor in zip(self.matrices, factors, strict=True):
            found = self.directions(entry, round)
            change_ML = factor.values(self._most) @ found.signs.T * (found.scale * weight)
            change_RC = as_shaped(change_ML, self.group.shape(entry))
            changes.append(self.group.part(entry, change_RC))
        self.momenta.add(changes)


@dataclass(frozen=True, slots=True)
class LowRankStep:
    """The step against a set's mean direction, in the directions of its round."""

    method: LowRank
    round: int
    told: tuple[Tensor, ...]
    """For each matrix float32 [M, K], integers of 2**-18; empty for an empty set."""
    rates: tuple[int, ...]
    """Learning rates in units."""
    rest: SignStep

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        self.rest.add_to(units_CN, tile)
        units = units_CN.view(-1)
        for entry, told_MK, rate in zip(self.method.matrices, self.told, self.rates, strict=bool(self.told)):
            start, stop = tile.within(entry.offset, entry.offset + entry.size)
            if start < stop:
                shift = self.method.group.place(entry).start - entry.offset
                moved = self._change_of(entry, told_MK, rate, start + shift, stop + shift)
                units[start - tile.start : stop - tile.start].sub_(moved)

    def _change_of(self, entry: Entry, told_MK: Tensor, rate: int, start: int, stop: int) -> Tensor:
        """Return int32 [stop - start]: the step of this range of the whole parameter's numbers."""
        shape = self.method.group.shape(entry)
        found, columns = self.method.directions(entry, self.round), shape[1]
        first = start // columns
        rows = slice(first, -(-stop // columns))
        if shape[0] > columns:
            spread_RC = spread(told_MK, replace(found, signs=found.signs[rows])).T
        else:
            spread_RC = spread(told_MK[rows], found)
        size = MATRIX_RMS * sqrt(prod(shape) / told_MK.shape[1])
        scale = rate * size * found.scale * 2.0**-TOLD_BITS
        moved_RC = torch.round(spread_RC.to(torch.float64) * scale).to(torch.int32)
        return moved_RC.reshape(-1)[start - first * columns : stop - first * columns]


class FactorTally(ContributionTally[bytes]):
    """One round's contributions as received. Factors are summed when a step is requested."""

    def __init__(self, method: LowRank, round: int) -> None:
        super().__init__(round)
        self._method = method
        self._votes: VoteTally = method.momenta.votes.tally(round)

    def _checked(self, peer: PeerId, payload: bytes) -> bytes:
        self._votes.add(peer, self._method.read(payload)[1])
        return payload

    def remove(self, peer: PeerId) -> None:
        super().remove(peer)
        self._votes.remove(peer)

    def rest(self) -> None:
        self._votes.rest()

    def step(self, factor: int = WHOLE) -> LowRankStep:
        factors = [self._method.read(payload)[0] for payload in self._kept.values()]
        return self._method.step_of(factors, self._votes.step(factor), self._round, factor)

    def vote_agreement(self, me: PeerId) -> VoteAgreement | None:
        found = self._votes.vote_agreement(me)
        if found is None:
            return None
        counts = torch.tensor([found.agreed, found.opposed, found.alone], device=self._method.device)
        return VoteAgreement(*self._method.group.total(counts).tolist())


def wide(matrix_RC: Tensor) -> Tensor:
    """Return the matrix as [M, L]."""
    return matrix_RC.T if matrix_RC.shape[0] > matrix_RC.shape[1] else matrix_RC


def as_shaped(wide_ML: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the matrix as [R, C], the shape of the parameter."""
    return wide_ML.T if shape[0] > shape[1] else wide_ML
