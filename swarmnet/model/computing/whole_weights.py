"""The weights that a stage is computed with, where all of them lie on one device.

A version of them is a set of leaf tensors that are views of one flat vector; a step publishes a new one, and
graphs keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from swarmnet.model.computing.choices import Computing
from swarmnet.model.computing.gradient_sum import GradientSum, Used
from swarmnet.model.computing.recomputed import recomputed
from swarmnet.model.decoder import RunLayer, forward, one_layer, scaled
from swarmnet.model.experts.load import Routed
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import NOTHING, Layout, views_of
from swarmnet.run.manifest import ModelShape, Span

Tiles: TypeAlias = Iterable[tuple[int, Tensor]]
"""A flat vector in float32, part by part: where each begins, and its numbers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which sequences of a microbatch are computed here."""

    sequences: slice
    count: bool = True
    """False: there were too few to have one; this one is computed for company, and counts nothing."""


class StageWeights(Protocol):
    """What computes a span of layers, on weights that are published anew, and sums gradients. Where several
    devices hold the stage together, each calls the same in the same order."""

    device: torch.device

    @property
    def routed(self) -> Routed:
        """As StageCompute.routed."""

    @property
    def version(self) -> object | None:
        """Of the newest weights; None: there are none yet."""

    def freeze(self, units: Tensor) -> None:
        """As StageCompute.freeze."""

    def publish(self, tiles: Tiles, in_use: Callable[[object], bool]) -> None:
        """`in_use`: whether an open graph needs a version."""

    def train(self, layout: Layout) -> None:
        """As GradientSum.gather."""

    def rows(self, sequences: int) -> Rows:
        """What of a microbatch of so many is computed here."""

    def run(
        self, version: object, inputs: Tensor, tokens_BT: Tensor | None, branch_scale: float, rows: Rows
    ) -> Tensor:
        """As swarmnet.model.decoder.forward, on the weights of a version."""

    def add_gradient_of(self, version: object, loss: Tensor, *inputs: Tensor) -> bool:
        """Run backward, also for those `inputs` that want a gradient. Whether what was found was finite and
        small enough to be summed, on all devices."""

    def agreed(self, here: bool) -> bool:
        """Whether all devices say so."""

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        """As GradientSum.use."""


class WholeWeights:
    """On one device."""

    def __init__(
        self, shape: ModelShape, span: Span, layout: Layout, computing: Computing, device: torch.device,
        frozen: Layout = NOTHING,
    ) -> None:  # fmt: skip
        self._frozen_layout = frozen
        self._frozen: dict[str, Tensor] = {}
        self._shape, self._span, self._layout = shape, span, layout
        self._number = torch.float32 if computing.dtype == "fp32" else torch.bfloat16
        self._again = recomputed if computing.recompute == "layer" else lambda run: run
        layers = range(span.first, span.stop)
        self.routed = {layer: [0] * shape.experts.count for layer in layers if shape.experts.count}
        self._run_layers: dict[int, RunLayer] = {
            layer: self._again(partial(one_layer, routed=self.routed.get(layer))) for layer in layers
        }
        self._compiled: dict[torch.Size, dict[int, RunLayer]] = {}
        """By sequences and tokens: only for the run's own, or a stranger could have others compiled."""
        self.device = device
        self._flat: Tensor | None = None
        """The newest version of the weights, of which those in `version` are views."""
        self._vectors = [
            (entry, torch.zeros(entry.shape, device=device))
            for entry in layout.entries
            if entry.is_vector and self._number != torch.float32
        ]
        """In float32 what is not multiplied with: gains of norms."""
        self._version: dict[str, Tensor] = {}
        sums = self._number if computing.uses_each else torch.float32
        self._gradient = GradientSum(layout, device, sums)

    @property
    def version(self) -> dict[str, Tensor] | None:
        return self._version or None

    def compile_for(self, sequences: int, tokens: int) -> None:
        """Have layers compiled for microbatches of so many sequences and tokens, with the first of them."""
        compiled: RunLayer = torch.compile(one_layer, dynamic=False)
        of_all = dict.fromkeys(self._run_layers, self._again(compiled))
        self._compiled[torch.Size((sequences, tokens))] = of_all

    def freeze(self, units: Tensor) -> None:
        self._frozen = {
            entry.name: to_floats(units[entry.place])
            .view(entry.shape)
            .to(self.device, torch.float32 if entry.is_vector else self._number)
            for entry in self._frozen_layout.entries
        }

    def publish(self, tiles: Tiles, in_use: Callable[[object], bool]) -> None:
        if len(self._frozen) < len(self._frozen_layout.entries):
            raise ValueError("freeze weights first")
        if self._flat is None or in_use(self._version):
            self._flat = torch.empty(self._layout.size, dtype=self._number, device=self.device)
        for start, tile in tiles:
            self._flat[start : start + len(tile)] = tile
            for entry, vector in self._vectors:
                first, stop = max(entry.offset, start), min(entry.offset + entry.size, start + len(tile))
                if first < stop:
                    vector[first - entry.offset : stop - entry.offset] = tile[first - start : stop - start]
        vectors = {entry.name: vector.clone() for entry, vector in self._vectors}
        # Leaves of their own: those of the version before may lie in a graph.
        self._version = {
            name: vectors.get(name, view).detach().requires_grad_(self._gradient.follows(name))
            for name, view in views_of(self._flat, self._layout).items()
        }
        for name, leaf in self._version.items():
            if leaf.requires_grad:
                self._gradient.follow(name, leaf)
        self._version |= self._frozen

    def train(self, layout: Layout) -> None:
        self._gradient.gather(layout)

    def rows(self, sequences: int) -> Rows:
        return Rows(slice(0, sequences))

    def run(
        self, version: object, inputs: Tensor, tokens_BT: Tensor | None, branch_scale: float, rows: Rows
    ) -> Tensor:
        assert isinstance(version, dict)
        run_layers = self._compiled.get(inputs.shape[:2], self._run_layers)
        return forward(
            scaled(version, branch_scale), self._shape, self._span, inputs,
            tokens_BT=tokens_BT, run_layers=run_layers,
        )  # fmt: skip

    def add_gradient_of(self, version: object, loss: Tensor, *inputs: Tensor) -> bool:
        assert isinstance(version, dict)
        leaves = [leaf for leaf in (*version.values(), *inputs) if leaf.requires_grad]
        return self._gradient.add_gradient_of(loss, leaves)

    def agreed(self, here: bool) -> bool:
        return here

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        return self._gradient.use(use)
