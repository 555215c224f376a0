"""Forward and backward of one stage, one microbatch at a time, on weights that change between them.

A version of the weights is a set of leaf tensors that are views of one flat vector. A graph keeps the version
it was built on, so a step never disturbs a microbatch under way; where there is none, as in a run of one
stage always, a new version takes the place of the old one in memory.
Gradients are of the *summed* loss and add up in one flat vector of the same layout
(computing/gradient_sum.py).

One thread at a time may use a StageCompute. Shape suffixes as in swarmnet/model/decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.computing.gradient_sum import GradientSum, Used
from swarmnet.model.computing.recomputed import recomputed
from swarmnet.model.decoder import RunLayer, forward, one_layer, scaled
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import NOTHING, Layout, views_of
from swarmnet.run.manifest import ModelShape, Span

Tiles: TypeAlias = Iterable[tuple[int, Tensor]]
"""A flat vector in float32, part by part: where each begins, and its numbers."""


class StageError(ValueError):
    """This microbatch cannot be computed; what was added of it, if anything, is finite and within the bound
    of every microbatch. The caller drops it and goes on."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What the last stage knows after a microbatch."""

    loss_sum: float
    """Cross entropy in nats, summed over the tokens."""
    tokens: int
    hidden_gradient: Tensor | None
    """[B, T, D], or [B, T, R] behind a narrow boundary: gradient of the summed loss at the stage's input;
    None if the input is tokens."""


@dataclass(frozen=True, slots=True)
class _Graph:
    version: dict[str, Tensor]
    inputs: Tensor
    tokens: Tensor | None
    """[B, T], behind a narrow boundary."""
    output: Tensor | None
    """None when the stage recomputes."""
    output_shape: torch.Size
    branch_scale: float


class StageCompute:
    """The model's slice `span`, with its open graphs and the gradient it has gathered."""

    def __init__(
        self, shape: ModelShape, span: Span, layout: Layout, computing: Computing = PLAIN,
        device: torch.device | None = None, frozen: Layout = NOTHING,
    ) -> None:  # fmt: skip
        """`layout`: of what is trained; `frozen`: of what is not, which `freeze` gives."""
        self._shape, self._span, self._layout = shape, span, layout
        self._frozen_layout = frozen
        self._frozen: dict[str, Tensor] = {}
        self._crossing = shape.crossing
        self._number = torch.float32 if computing.dtype == "fp32" else torch.bfloat16
        self._forgets = computing.recompute == "stage"
        self._again = recomputed if computing.recompute == "layer" else lambda run: run
        self._run_layer: RunLayer = self._again(one_layer)
        self._compiled: dict[torch.Size, RunLayer] = {}
        """By sequences and tokens: only for the run's own, or a stranger could have others compiled."""
        self._compiles = computing.compile and not shape.experts.count  # How many tokens these have varies.
        self._device = device or torch.device("cpu")
        self._flat: Tensor | None = None
        """The newest version of the weights, of which those in `_version` are views."""
        self._vectors = [
            (entry, torch.zeros(entry.shape, device=self._device))
            for entry in layout.entries
            if len(entry.shape) == 1 and self._number != torch.float32
        ]
        """In float32 what is not multiplied with: gains of norms."""
        self._version: dict[str, Tensor] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        sums = self._number if computing.uses_each else torch.float32
        self._gradient = GradientSum(layout, self._device, sums)

    @property
    def open(self) -> int:
        """Graphs that wait for their backward pass."""
        return len(self._graphs)

    def freeze(self, units: Tensor) -> None:
        """Compute with these weights, which are never trained, in the units of fixed_point: int32
        [frozen.size]. Before weights are published."""
        self._frozen = {
            entry.name: to_floats(units[entry.place])
            .view(entry.shape)
            .to(self._device, torch.float32 if len(entry.shape) == 1 else self._number)
            for entry in self._frozen_layout.entries
        }

    def publish(self, tiles: Tiles) -> None:
        """Use these weights from the next forward on: written over those before, where no graph needs them
        any more. `tiles`: all of [layout.size]. ValueError before what is frozen is known."""
        if len(self._frozen) < len(self._frozen_layout.entries):
            raise ValueError("freeze weights first")
        if self._flat is None or any(graph.version is self._version for graph in self._graphs.values()):
            self._flat = torch.empty(self._layout.size, dtype=self._number, device=self._device)
        for start, tile in tiles:
            self._flat[start : start + len(tile)] = tile
            for entry, vector in self._vectors:
                first, stop = max(entry.offset, start), min(entry.offset + entry.size, start + len(tile))
                if first < stop:
                    vector[first - entry.offset : stop - entry.offset] = tile[first - start : stop - start]
        vectors = {entry.name: vector.clone() for entry, vector in self._vectors}
        # Leaves of their own: those of the version before may lie in a graph.
        self._version = {
            name: vectors.get(name, view).detach().requires_grad_()
            for name, view in views_of(self._flat, self._layout).items()
        }
        for name, leaf in self._version.items():
            self._gradient.follow(name, leaf)
        self._version |= self._frozen

    def warm_up(self, sequences: int, tokens: int) -> None:
        """Compile what is to be compiled, for microbatches of so many sequences and tokens. May take minutes;
        before weights are published."""
        if not self._compiles:
            return
        compiled: RunLayer = torch.compile(one_layer, dynamic=False)
        self._compiled[torch.Size((sequences, tokens))] = self._again(compiled)
        self.freeze(torch.zeros(self._frozen_layout.size, dtype=torch.int32))
        self.publish([(0, torch.zeros(self._layout.size, device=self._device))])
        tokens_BT = torch.zeros(sequences, tokens, dtype=torch.int64)
        inputs = tokens_BT
        if not self._span.has_embedding:
            inputs = torch.zeros(sequences, tokens, self._crossing)
        if self._span.has_head:
            self.finish("warm up", inputs, tokens_BT, tokens_BT)
        else:
            self.backward("warm up", self.forward("warm up", inputs, tokens_BT=tokens_BT))
        self.use_gradient(lambda _gradient: None)

    def forward(
        self, key: Hashable, inputs: Tensor, branch_scale: float = 1.0, tokens_BT: Tensor | None = None
    ) -> Tensor:
        """Compute the stage's hidden_BTD from tokens_BT (first stage) or hidden_BTD; keep the graph as `key`.
        Behind a narrow boundary it takes both (swarmnet.model.decoder.forward).

        Its layers add `branch_scale` times as much to the hidden states
        (swarmnet.run.path_rules.Rules.branch_scale). Raises StageError when the inputs do not fit the model,
        the result is not finite, or `key` is open.
        """
        if key in self._graphs:
            raise StageError(f"microbatch {key} is already open in this stage")
        inputs = self._leaf(key, inputs)
        tokens_BT = self._beside(key, inputs, tokens_BT)
        with torch.set_grad_enabled(not self._forgets):
            output_BTD = self._forward(scaled(self._version, branch_scale), inputs, tokens_BT)
        _require_finite(key, "hidden states", [output_BTD])
        kept = None if self._forgets else output_BTD
        self._graphs[key] = _Graph(self._version, inputs, tokens_BT, kept, output_BTD.shape, branch_scale)
        return output_BTD.detach()

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> Finished:
        """The last stage's whole work: forward, loss and backward. Raises StageError."""
        inputs = self._leaf(key, inputs)
        if labels_BT.shape != inputs.shape[:2] or labels_BT.dtype != torch.int64:
            raise StageError(
                f"microbatch {key}: labels are {_kind(labels_BT)}, need int64 {list(inputs.shape[:2])}"
            )
        labels_BT = labels_BT.to(inputs.device)
        self._require_vocabulary(key, "labels", labels_BT)
        tokens_BT = self._beside(key, inputs, tokens_BT)
        with torch.enable_grad():
            logits_BTV = self._forward(self._version, inputs, tokens_BT)
            loss = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")
        _require_finite(key, "loss", [loss])
        hidden_gradient_BTD = self._accumulate(key, self._version, loss, inputs)
        return Finished(loss.item(), labels_BT.numel(), hidden_gradient_BTD)

    def backward(self, key: Hashable, hidden_gradient: Tensor) -> Tensor | None:
        """Add the parameters' gradients, given the gradient at the output (float32 [B, T, D]).

        Returns the gradient at the stage's input, None in the first stage. The graph is gone afterwards,
        also when this raises StageError: key not open, wrong shape, or a gradient too large to be summed.
        """
        graph = self._graphs.pop(key, None)
        if graph is None:
            raise StageError(f"microbatch {key} is not open in this stage")
        if hidden_gradient.shape != graph.output_shape or hidden_gradient.dtype != torch.float32:
            raise StageError(
                f"microbatch {key}: gradient is {_kind(hidden_gradient)}, "
                f"need float32 {list(graph.output_shape)}"
            )
        output = graph.output
        if output is None:
            with torch.enable_grad():
                output = self._forward(
                    scaled(graph.version, graph.branch_scale), graph.inputs, graph.tokens
                )
        # The gradient of this sum at `output` is `hidden_gradient` to the bit. Given to autograd as what
        # it is, it would make torch import sympy: 38 MiB in every peer that is not the last stage's.
        with torch.enable_grad():
            product = (output * hidden_gradient.to(output.device)).sum()
        return self._accumulate(key, graph.version, product, graph.inputs)

    def drop(self, key: Hashable) -> None:
        """Forget the graph of `key`, if it is open."""
        self._graphs.pop(key, None)

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        """As GradientSum.use."""
        return self._gradient.use(use)

    def _forward(
        self, weights: dict[str, Tensor], inputs: Tensor, tokens_BT: Tensor | None
    ) -> Tensor:
        run_layer = self._compiled.get(inputs.shape[:2], self._run_layer)
        return forward(
            weights, self._shape, self._span, inputs, tokens_BT=tokens_BT, run_layer=run_layer
        )

    def _accumulate(
        self, key: Hashable, version: dict[str, Tensor], loss: Tensor, inputs: Tensor
    ) -> Tensor | None:
        leaves = [tensor for name, tensor in version.items() if name not in self._frozen]
        if inputs.requires_grad:
            leaves.append(inputs)
        is_good = self._gradient.add_gradient_of(loss, leaves)
        found, inputs.grad = inputs.grad, None  # Goes on to the stage before, and is not summed here.
        if not is_good or (found is not None and not torch.linalg.vector_norm(found).isfinite()):
            raise StageError(f"microbatch {key}: gradient not finite, or too large to be summed")
        return found

    def _leaf(self, key: Hashable, inputs: Tensor) -> Tensor:
        """Check a microbatch's inputs, which a stranger may have sent, and make them a leaf of the graph."""
        if not self._version:
            raise ValueError("publish weights first")
        if self._span.has_embedding:
            kind, fits = "int64 tokens [B, T]", inputs.dtype == torch.int64 and inputs.dim() == 2
        else:
            kind = f"float32 hidden states [B, T, {self._crossing}]"
            fits = inputs.dtype == torch.float32 and inputs.shape[2:] == (self._crossing,)
        if not fits:
            raise StageError(f"microbatch {key}: inputs are {_kind(inputs)}, this stage takes {kind}")
        sequences, tokens = inputs.shape[:2]
        if sequences == 0 or not 0 < tokens <= self._shape.context:
            raise StageError(
                f"microbatch {key}: {sequences} sequences of {tokens} tokens; "
                f"the model takes 1 to {self._shape.context} tokens"
            )
        inputs = inputs.detach().to(next(iter(self._version.values())).device)
        if self._span.has_embedding:
            self._require_vocabulary(key, "inputs", inputs)
            return inputs
        return inputs.requires_grad_()

    def _beside(self, key: Hashable, inputs: Tensor, tokens_BT: Tensor | None) -> Tensor | None:
        """Check the tokens that hidden states behind a narrow boundary belong to; None: it takes none."""
        if self._span.first not in self._shape.boundary.after:
            return None
        if tokens_BT is None or tokens_BT.shape != inputs.shape[:2] or tokens_BT.dtype != torch.int64:
            came, need = "none" if tokens_BT is None else _kind(tokens_BT), list(inputs.shape[:2])
            raise StageError(
                f"microbatch {key}: tokens beside hidden states are {came}, need int64 {need}"
            )
        tokens_BT = tokens_BT.to(inputs.device)
        self._require_vocabulary(key, "tokens beside hidden states", tokens_BT)
        return tokens_BT

    def _require_vocabulary(self, key: Hashable, what: str, tokens_BT: Tensor) -> None:
        least, most = (int(bound) for bound in torch.aminmax(tokens_BT))
        if least < 0 or most >= self._shape.vocabulary:
            raise StageError(
                f"microbatch {key}: {what} hold token {least if least < 0 else most}, "
                f"the vocabulary is 0 to {self._shape.vocabulary - 1}"
            )


def copied(weights: Tensor) -> Tiles:
    """What `StageCompute.publish` takes, of weights that lie elsewhere."""
    return [(0, weights)]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _require_finite(key: Hashable, what: str, tensors: list[Tensor] | tuple[Tensor, ...]) -> None:
    # Both bounds are NaN if any value is; torch.isfinite of every value takes eight times as long.
    bounds = [bound for tensor in tensors for bound in torch.aminmax(tensor)]
    if not torch.stack(bounds).isfinite().all():
        raise StageError(f"microbatch {key}: {what} not finite")
