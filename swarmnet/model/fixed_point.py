"""Represent weights as fixed-point integers, whose sum has the same bits in any order.

A weight is an int32 count of units of 2**-22. Optimizer steps and late corrections are then integer sums,
which commute exactly. With 2**-22 every weight below 4 in magnitude is also exactly a float32 (24-bit
mantissa). A finer grid would not allow that. A float32 checkpoint loses nothing
(docs/decisions/0002-grid.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID_BITS = 22
UNIT = 2.0**-GRID_BITS


def to_units(values: Tensor) -> Tensor:
    """Round float values to the grid, half to even. Returns int32 of the same shape."""
    return torch.round(values.to(torch.float64) / UNIT).to(torch.int32)


def to_floats(units: Tensor) -> Tensor:
    """Return the float32 values of int32 units; exact below 4 in magnitude."""
    return units.to(torch.float32).mul_(UNIT)


def learning_rate_units(learning_rate: float) -> int:
    """Return a learning rate in whole units, at least 1, because a step of 0 would silently stop the run."""
    return max(1, round(learning_rate / UNIT))
