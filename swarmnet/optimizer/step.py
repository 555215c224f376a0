"""What a round does to the weights, in as little memory as it takes: several rounds are open at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.fixed_point import learning_rate_units
from swarmnet.model.flat_layout import Layout
from swarmnet.model.parameters import branch_share
from swarmnet.optimizer.tiling import Tile, all_tiles, empty_padding
from swarmnet.run.manifest import Manifest, learning_rate
from swarmnet.run.rates import WHOLE, scaled


class Step(Protocol):
    """Whole units for each weight."""

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        """To weights, int32 [C, N], those of a tile, in place; and where the group settles a momentum with
        them (model/state_layout.py), to that, which must be as after the round before. None: from rest."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Weights that move at one rate."""

    start: int
    stop: int
    """Both in the flat vector."""
    signs: int
    """Where their signs begin."""
    rate: int
    """Units."""


@dataclass(frozen=True, slots=True)
class SignStep:
    """A learning rate against each sign of a direction: what all sign methods end with."""

    signs: Tensor
    """int8: -1, 0, 1."""
    stretches: tuple[Stretch, ...]

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        units = units_CN.view(-1)
        for each in self.stretches:
            start, stop = tile.within(each.start, each.stop)
            if start < stop:
                shift = each.signs - each.start
                moved = self.signs[start + shift : stop + shift]
                units[start - tile.start : stop - tile.start].add_(moved, alpha=-each.rate)


def sign_step(signs: Tensor, layout: Layout, manifest: Manifest, round: int, factor: int = WHOLE) -> SignStep:
    """The step of `round` against int8 [layout.size] signs of a direction, which it keeps: a learning rate
    each, times the parameter's share (branch_share) and the thousandths of `factor` that the run's owner
    ordered (run/rates.py), and 0 in the padding."""
    rate = learning_rate(manifest.sync, round)
    empty_padding(signs, layout)
    stretches = (
        Stretch(entry.offset, entry.offset + entry.size, entry.offset,
                scaled(learning_rate_units(rate * branch_share(manifest.model, entry.name)), factor))
        for entry in layout.entries
    )  # fmt: skip
    return SignStep(signs, tuple(stretches))


def add_step(units: Tensor, step: Step, layout: Layout, momentum: Tensor | None = None) -> None:
    """To int32 [layout.size], both, in place."""
    for tile in all_tiles(layout, units.device):
        step.add_to(tile.of(units), tile, None if momentum is None else tile.of(momentum))


def dense(step: Step, layout: Layout, device: torch.device | None = None) -> Tensor:
    """int32 [layout.size]: the same, a number for each weight. `device`: where the step lies."""
    units = torch.zeros(layout.size, dtype=torch.int32, device=device)
    add_step(units, step, layout)
    return units
