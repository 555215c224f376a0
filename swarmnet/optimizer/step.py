"""The effect of a round on the weights, in little memory, because several rounds are open at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.fixed_point import learning_rate_units
from swarmnet.model.flat_layout import Layout
from swarmnet.model.parameters import residual_init_scale
from swarmnet.optimizer.tiling import Tile, all_tiles, empty_padding
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.run.manifest import Manifest, learning_rate
from swarmnet.run.rates import WHOLE, scaled

Kept = TypeVar("Kept")


class Step(Protocol):
    """A change of each weight in integer units."""

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        """Change the weights of a tile, int32 [C, N], in place. If the group settles a momentum
        (`model/state_layout.py`), it is updated too and must be that of the round before. None: from zero."""


class RoundAggregate(Protocol):
    """The contributions of one round. They are added and removed in any order; only the set matters."""

    def add(self, peer: PeerId, payload: bytes) -> None:
        """Add a contribution. Raises ContributionError if it is invalid, without any change, and ValueError
        if `peer` is in the set."""

    def remove(self, peer: PeerId) -> None:
        """Remove the contribution of `peer`. Raises KeyError if it is not in the set."""

    def step(self, factor: int = WHOLE) -> Step:
        """Return the step, in `fixed_point.UNIT`s. It is bit-equal for equal sets and factors."""

    @property
    def contributors(self) -> int:
        """Number of peers whose contributions are in the set."""

    def settle(self, chain: bytes) -> None:
        """Note that the round has settled with this set. `chain` is the chain of settled sets after it."""

    def rest(self) -> None:
        """Free caches. Called when the round is applied, because its set rarely changes afterwards."""

    def vote_agreement(self, me: PeerId) -> VoteAgreement | None:
        """Return how the group's votes compare with this peer's; None without votes in the set."""


class ContributionTally(Generic[Kept]):
    """The part of a `RoundAggregate` that keeps contributions. Subclasses say what of each, and sum them when
    a step is requested."""

    def __init__(self, round: int) -> None:
        self._round = round
        self._kept: dict[PeerId, Kept] = {}

    def add(self, peer: PeerId, payload: bytes) -> None:
        if peer in self._kept:
            raise ValueError(f"{peer} is in the tally of round {self._round} already: remove it first")
        self._kept[peer] = self._checked(peer, payload)

    def _checked(self, peer: PeerId, payload: bytes) -> Kept:
        """Return what is kept of a new contribution. Raises ContributionError if it is invalid."""
        raise NotImplementedError

    def remove(self, peer: PeerId) -> None:
        del self._kept[peer]

    @property
    def contributors(self) -> int:
        return len(self._kept)

    def settle(self, chain: bytes) -> None:
        """Do nothing: the settled weights are all that remains of a round."""

    def rest(self) -> None:
        """Do nothing: only the set is kept."""

    def vote_agreement(self, me: PeerId) -> VoteAgreement | None:
        """Return None: what is kept does not say how a single peer voted."""
        return None


@dataclass(frozen=True, slots=True)
class RateRange:
    """A range of weights, or every n-th weight of it, with one learning rate."""

    start: int
    stop: int
    """Both are positions in the flat vector. The weight at `start` is the first that changes."""
    signs: int
    """First position in the signs."""
    rate: int
    """Learning rate in units."""
    stride: int = 1
    """Distance between two weights that change. Their signs are consecutive."""


@dataclass(frozen=True, slots=True)
class SignStep:
    """A learning rate against each sign of a direction: the result of all sign methods."""

    signs: Tensor
    """int8: -1, 0, 1."""
    stretches: tuple[RateRange, ...]

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        units = units_CN.view(-1)
        for each in self.stretches:
            start, stop = tile.within(each.start, each.stop)
            start += (each.start - start) % each.stride
            if start < stop:
                changed = units[start - tile.start : stop - tile.start : each.stride]
                first = each.signs + (start - each.start) // each.stride
                changed.add_(self.signs[first : first + len(changed)], alpha=-each.rate)


@dataclass(frozen=True, slots=True)
class StepSum:
    """Several steps, one after the other."""

    steps: tuple[Step, ...]

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        for step in self.steps:
            step.add_to(units_CN, tile, momentum_CN)


def sign_step(signs: Tensor, layout: Layout, manifest: Manifest, round: int, factor: int = WHOLE) -> SignStep:
    """Return the step of `round` against a direction's signs, int8 [layout.size], which it keeps. The step is
    the learning rate times the parameter's share (`residual_init_scale`) and the owner's `factor` in
    thousandths (`run/rates.py`). It is 0 in the padding."""
    empty_padding(signs, layout)
    stretches = (
        RateRange(
            entry.offset,
            entry.offset + entry.size,
            entry.offset,
            rate_units(manifest, entry.name, round, factor),
        )
        for entry in layout.entries
    )
    return SignStep(signs, tuple(stretches))


def rate_units(manifest: Manifest, name: str, round: int, factor: int, size: float = 1.0) -> int:
    """Return the learning rate of a parameter in units: `size` times that of the round, times the parameter's
    share (`residual_init_scale`) and the owner's `factor` in thousandths (`run/rates.py`)."""
    rate = learning_rate(manifest.sync, round) * size
    return scaled(learning_rate_units(rate * residual_init_scale(manifest.model, name)), factor)


def add_step(units: Tensor, step: Step, layout: Layout, momentum: Tensor | None = None) -> None:
    """Apply a step to weights and momentum, both int32 [layout.size], in place."""
    for tile in all_tiles(layout, units.device):
        step.add_to(tile.of(units), tile, None if momentum is None else tile.of(momentum))


def dense(step: Step, layout: Layout, device: torch.device | None = None) -> Tensor:
    """Return a step as a number for each weight, int32 [layout.size]. `device` is where the step is."""
    units = torch.zeros(layout.size, dtype=torch.int32, device=device)
    add_step(units, step, layout)
    return units
