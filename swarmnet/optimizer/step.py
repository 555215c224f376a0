"""What a round does to the weights, in as little memory as it takes: several rounds are open at a time.

Signs take a byte each. Where everybody says a chunk's numbers as small integers times a power of two, their
sum is a small integer times the least of these powers, and a byte holds most sums exactly (`Sums`).

Shapes: C chunks of a plane, N numbers of a chunk, M of them that a round speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.fixed_point import learning_rate_units
from swarmnet.model.flat_layout import Layout
from swarmnet.model.parameters import branch_share
from swarmnet.optimizer.tiling import ROUND_CHUNKS, Tile, all_tiles, empty_padding
from swarmnet.run.manifest import Manifest, learning_rate
from swarmnet.run.rates import WHOLE, scaled

NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64)
NO_SHIFT = 62
"""Above any."""


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


@dataclass(frozen=True, slots=True)
class Term:
    """What is said of some chunks of a plane."""

    rows: slice
    """Which these are."""
    exponents: Tensor
    """int32 [C, 1]: of 2."""
    values: Callable[[slice], Tensor]
    """int8 [C, M], of so many of them."""
    largest: int
    """Of a value."""
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one plane."""

    numbers: Tensor
    """[C, M]: of the least kind of integer that holds them."""
    shifts: Tensor
    """int32 [C, 1]: a sum is its number times two to this."""
    counts: Tensor
    """int64 [C, 1]: of how many it is, 1 where nothing was said."""

    def means(self, rows: slice) -> Tensor:
        """int32 [C, M]: of these chunks, halves upwards."""
        numbers_CM, shifts_C1 = self.numbers[rows], self.shifts[rows]
        counts_C1 = self.counts[rows]
        if bool((counts_C1 == 1).all()):
            return numbers_CM.to(torch.int32) << shifts_C1
        return mean_of(numbers_CM.to(torch.int64) << shifts_C1, counts_C1)


def added(terms: Sequence[Term], chunks: int, width: int, device: torch.device) -> Sums:
    """The sum of all terms."""
    shifts_C1 = torch.full((chunks, 1), NO_SHIFT, dtype=torch.int32, device=device)
    counts_C1, bounds_C1 = torch.zeros((2, chunks, 1), dtype=torch.int64, device=device)
    for term in terms:
        shifts_C1[term.rows] = torch.minimum(shifts_C1[term.rows], term.exponents)
        counts_C1[term.rows] += term.weight
    for term in terms:
        bounds_C1[term.rows] += term.largest * _sizes(term, shifts_C1)
    shifts_C1[counts_C1 == 0] = 0
    largest = int(bounds_C1.max()) if chunks else 0
    kind = next(kind for kind in NUMBERS if largest <= torch.iinfo(kind).max)
    numbers_CM = torch.zeros(chunks, width, dtype=kind, device=device)
    for term in terms:
        sizes_C1 = _sizes(term, shifts_C1).to(kind)
        for rows in _tiles(term.rows):
            within = slice(rows.start - term.rows.start, rows.stop - term.rows.start)
            numbers_CM[rows] += term.values(within) * sizes_C1[within]
    return Sums(numbers_CM, shifts_C1, counts_C1.clamp_(min=1))


def mean_of(sum_CM: Tensor, count: Tensor | int) -> Tensor:
    """int32: of so many, halves upwards. Divided in float64, of which a processor divides several at once: a
    quotient is below 2**31, so it is rounded by less than 2**-21, and where it is no integer it is at least
    2**-20 away from one, for counts below 2**19."""
    doubled = (2 * sum_CM + count).to(torch.float64)
    return torch.floor(doubled / (2 * count)).to(torch.int32)


def _sizes(term: Term, shifts_C1: Tensor) -> Tensor:
    """int64 [C, 1]: what one of a term's values is in the sums."""
    relative_C1 = (term.exponents - shifts_C1[term.rows]).to(torch.int64)
    return torch.full_like(relative_C1, term.weight) << relative_C1


def _tiles(rows: slice) -> Iterator[slice]:
    return (
        slice(first, min(first + ROUND_CHUNKS, rows.stop))
        for first in range(rows.start, rows.stop, ROUND_CHUNKS)
    )
