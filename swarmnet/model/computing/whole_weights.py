"""The weights of a stage that lie on one device.

A *version* of them is a set of leaf tensors that are views of one flat vector. An optimizer step publishes a
new version. A microbatch whose backward pass is still to come has an *open graph*, which keeps its version.
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
from swarmnet.run.manifest import Span
from swarmnet.run.schema import ModelShape

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Tiles: TypeAlias = Iterable[tuple[int, Tensor]]
"""A flat float32 vector in parts: the start of each, and its numbers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The sequences of a microbatch that this device computes."""

    sequences: slice
    count: bool = True
    """False if this sequence is computed only so that all devices make the same calls. It is not counted."""


class StageWeights(Protocol):
    """Runs a span of layers on weights that are published repeatedly, and sums gradients. If several devices
    hold the stage together, each makes the same calls in the same order."""

    device: torch.device

    @property
    def routed(self) -> Routed:
        """Number of trained tokens of each expert by layer."""

    @property
    def version(self) -> object | None:
        """The newest weights; None if there are none yet."""

    def freeze(self, units: Tensor) -> None:
        """Set the untrained weights, int32 [frozen.size] in fixed-point units. Called before `publish`."""

    def publish(self, tiles: Tiles, in_use: Callable[[object], bool]) -> None:
        """Use new weights. `in_use` returns whether an open graph needs a version."""

    def train(self, layout: Layout) -> None:
        """Sum gradients of the parameters in `layout` only, from zero. Others are dropped."""

    def rows(self, sequences: int) -> Rows:
        """Return the part of a microbatch of `sequences` sequences that is computed here."""

    def run(
        self,
        version: object,
        inputs: Tensor,
        tokens_BT: Tensor | None,
        branch_scale: float,
        rows: Rows,
        end: Span | None = None,
    ) -> Tensor:
        """Run the stage's layers on the weights of a version, for the sequences `rows`; with `end`, only
        those of the model's end that it has. Each layer adds `branch_scale` times as much as usual. Returns
        hidden states, or logits after the head."""

    def add_gradient_of(self, version: object, loss: Tensor, inputs: Tensor, scale: float) -> bool:
        """Run the backward pass from `loss`, which is `scale` times too large, and add the parameters'
        gradients to the sum. Sets `.grad` of `inputs`, still scaled, if they require one. Returns whether the
        gradient is finite and not too large on all devices."""

    def agreed(self, here: bool) -> bool:
        """Return whether `here` is true on all devices."""

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        """Return `use(gradient)` for the gradient [layout.size] summed since the last call, and zero it."""


class WholeWeights:
    """The weights of a whole stage on one device."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        span: Span,
        layout: Layout,
        computing: Computing,
        device: torch.device,
        frozen: Layout = NOTHING,
    ) -> None:
        """Create the weights. `layout` is that of the trained parameters and `frozen` that of the others.
        They are set later by `publish` and `freeze`."""
        self._frozen_layout = frozen
        self._frozen: dict[str, Tensor] = {}
        self._shape = shape
        self._span = span
        self._layout = layout
        self._dtype = TORCH_DTYPES[computing.dtype]
        self._wrap_layer = recomputed if computing.activation_checkpointing == "layer" else lambda run: run
        layers = span.layers
        self.routed = {
            layer: [0] * shape.experts.num_experts for layer in layers if shape.experts.num_experts
        }
        self._run_layers: dict[int, RunLayer] = {
            layer: self._wrap_layer(partial(one_layer, routed=self.routed.get(layer))) for layer in layers
        }
        self._compiled: dict[torch.Size, dict[int, RunLayer]] = {}
        """Compiled layers by (sequences, tokens): only the run's own shape, so that peers cannot add any."""
        self.device = device
        self._flat: Tensor | None = None
        """The newest weights, of which those in `version` are views."""
        self._vectors = [
            (entry, torch.zeros(entry.shape, device=device))
            for entry in layout.entries
            if entry.is_vector and self._dtype != torch.float32
        ]
        """Vectors (gains of norms), which stay in float32 because no product uses them."""
        self._version: dict[str, Tensor] = {}
        # Sums in float16 would lose what scaling has kept.
        sums = torch.bfloat16 if computing.uses_each and computing.dtype == "bf16" else torch.float32
        self._gradient = GradientSum(layout, device, sums)

    @property
    def version(self) -> dict[str, Tensor] | None:
        return self._version or None

    def compile_for(self, sequences: int, tokens: int) -> None:
        """Compile layers for microbatches of this shape when the first one is computed."""
        compiled: RunLayer = torch.compile(one_layer, dynamic=False)
        compiled_layers = dict.fromkeys(self._run_layers, self._wrap_layer(compiled))
        self._compiled[torch.Size((sequences, tokens))] = compiled_layers

    def freeze(self, units: Tensor) -> None:
        """Set the weights that are not trained. `units` are fixed-point integers, int32 [frozen.size]."""
        self._frozen = {
            entry.name: to_floats(units[entry.place])
            .view(entry.shape)
            .to(self.device, torch.float32 if entry.is_vector else self._dtype)
            for entry in self._frozen_layout.entries
        }

    def publish(self, tiles: Tiles, in_use: Callable[[object], bool]) -> None:
        """Publish new weights as a new version, a set of leaf tensors. `tiles` are (offset in the flat
        vector, values). The flat vector is overwritten, or a new one is allocated if `in_use` says that an
        open graph needs it. If it is bf16, the leaves of the gains of norms are float32 (`_vectors`).
        Gradients of trained leaves are summed from now on. ValueError if frozen weights are missing."""
        if len(self._frozen) < len(self._frozen_layout.entries):
            raise ValueError("freeze weights first")
        if self._flat is None or in_use(self._version):
            self._flat = torch.empty(self._layout.size, dtype=self._dtype, device=self.device)
        for start, tile in tiles:
            self._flat[start : start + len(tile)] = tile
            for entry, vector in self._vectors:
                # The range of the flat vector that is both in this tile and in this parameter.
                first, stop = max(entry.offset, start), min(entry.offset + entry.size, start + len(tile))
                if first < stop:
                    vector[first - entry.offset : stop - entry.offset] = tile[first - start : stop - start]
        vectors = {entry.name: vector.clone() for entry, vector in self._vectors}
        # New leaves, because an open graph may contain those of the version before.
        self._version = {}
        for name, view in views_of(self._flat, self._layout).items():
            leaf = vectors.get(name, view).detach()
            leaf.requires_grad_(self._gradient.sums_parameter(name))
            self._version[name] = leaf
            if leaf.requires_grad:
                self._gradient.watch_leaf(name, leaf)
        self._version |= self._frozen

    def train(self, layout: Layout) -> None:
        self._gradient.restart(layout)

    def rows(self, sequences: int) -> Rows:
        return Rows(slice(0, sequences))

    def run(
        self,
        version: object,
        inputs: Tensor,
        tokens_BT: Tensor | None,
        branch_scale: float,
        rows: Rows,
        end: Span | None = None,
    ) -> Tensor:
        """Run the stage's layers on the weights of `version`, with compiled layers if there are some for this
        shape; with `end`, only those. Returns hidden states, or logits after the head. `branch_scale`
        multiplies what each attention and feed-forward branch adds to the hidden states."""
        assert isinstance(version, dict)
        run_layers = self._compiled.get(inputs.shape[:2], self._run_layers)
        return forward(
            scaled(version, branch_scale),
            self._shape,
            end or self._span,
            inputs,
            tokens_BT=tokens_BT,
            run_layers=run_layers,
        )

    def add_gradient_of(self, version: object, loss: Tensor, inputs: Tensor, scale: float) -> bool:
        assert isinstance(version, dict)
        leaves = [leaf for leaf in (*version.values(), inputs) if leaf.requires_grad]
        return self._gradient.add_gradient_of(loss, leaves, scale)

    def agreed(self, here: bool) -> bool:
        return here

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        return self._gradient.use(use)
