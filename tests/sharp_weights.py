"""Weights of a small model for tests of what is written with it."""

from dataclasses import replace

from torch import Tensor

from swarmnet.fixed_point import to_floats
from swarmnet.layout import layout_of
from swarmnet.manifest import ModelShape
from swarmnet.model import initial_units
from swarmnet.parameters import parameter_shapes, whole


def sharp_weights(shape: ModelShape) -> dict[str, Tensor]:
    """Large ones, so that what comes next depends sharply on what came before."""
    layout = layout_of(parameter_shapes(shape, whole(shape)))
    flat = to_floats(initial_units(replace(shape, initial_deviation=0.4), whole(shape), layout, seed=1))
    return {
        entry.name: flat[entry.offset : entry.offset + entry.size].view(entry.shape)
        for entry in layout.entries
    }
