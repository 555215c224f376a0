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

    def add_to(self, units_CN: Tensor, tile: Tile) -> None:
        """In place, to int32 [C, N], those of a tile."""


@dataclass(frozen=True, slots=True)
class SignStep:
    """A learning rate against each sign of a direction: what all sign methods end with."""

    signs: Tensor
    """int8 [layout.size]: -1, 0, 1; 0 in the padding."""
    rates: tuple[tuple[int, int, int], ...]
    """From `start` to `stop` of the vector, units each."""

    def add_to(self, units_CN: Tensor, tile: Tile) -> None:
        units = units_CN.view(-1)
        for start, stop, rate in self.rates:
            first, last = max(start, tile.start), min(stop, tile.stop)
            if first < last:
                units[first - tile.start : last - tile.start].add_(self.signs[first:last], alpha=-rate)


def sign_step(signs: Tensor, layout: Layout, manifest: Manifest, round: int, factor: int = WHOLE) -> SignStep:
    """The step of `round` against int8 [layout.size] signs of a direction, which it keeps: a learning rate
    each, times the parameter's share (branch_share) and the thousandths of `factor` that the run's owner
    ordered (run/rates.py), and 0 in the padding."""
    rate = learning_rate(manifest.sync, round)
    empty_padding(signs, layout)
    rates = (
        (entry.offset, entry.offset + entry.size,
         scaled(learning_rate_units(rate * branch_share(manifest.model, entry.name)), factor))
        for entry in layout.entries
    )  # fmt: skip
    return SignStep(signs, tuple(rates))


def add_step(units: Tensor, step: Step, layout: Layout) -> None:
    """To int32 [layout.size], in place."""
    for tile in all_tiles(layout):
        step.add_to(tile.of(units), tile)


def dense(step: Step, layout: Layout) -> Tensor:
    """int32 [layout.size]: the same, a number for each weight."""
    units = torch.zeros(layout.size, dtype=torch.int32)
    add_step(units, step, layout)
    return units
