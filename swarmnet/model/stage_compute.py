"""Forward and backward of one stage, one microbatch at a time, on weights that change between them.

A version of the weights is a set of leaf tensors that are views of one flat vector. A graph keeps the version
it was built on, so a step never disturbs a microbatch under way; where there is none, as in a run of one
stage always, a new version takes the place of the old one in memory.
Gradients are of the *summed* loss and add up in one flat vector of the same layout.

One thread at a time may use a StageCompute. Shape suffixes as in swarmnet/model/decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import hypot, isfinite
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.decoder import forward, scaled
from swarmnet.model.flat_layout import Layout
from swarmnet.model.sizes import MOST_NORM
from swarmnet.run.manifest import ModelShape, Span

Used = TypeVar("Used")
Recompute = Literal["none", "stage"]
"""What backward computes again: nothing, or the stage's forward (only inputs are kept; 4/3 the compute)."""


class StageError(ValueError):
    """This microbatch cannot be computed; nothing of it was added. The caller drops it and goes on."""


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
        self, shape: ModelShape, span: Span, layout: Layout, recompute: Recompute = "none",
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self._shape, self._span, self._layout = shape, span, layout
        self._crossing = shape.crossing
        self._recompute = recompute == "stage"
        self._device = device or torch.device("cpu")
        self._flat: Tensor | None = None
        """The newest version of the weights, of which those in `_version` are views."""
        self._version: dict[str, Tensor] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self._gradient = torch.zeros(layout.size, device=self._device)
        self._gradients = list(_views(self._gradient, layout).values())

    @property
    def open(self) -> int:
        """Graphs that wait for their backward pass."""
        return len(self._graphs)

    def publish(self, write: Callable[[Tensor], None]) -> None:
        """Use what is written into float32 [layout.size] from the next forward on: over the version before,
        where no graph needs that any more."""
        if self._flat is None or any(graph.version is self._version for graph in self._graphs.values()):
            self._flat = torch.empty(self._layout.size, device=self._device)
        write(self._flat)
        # Leaves of their own: those of the version before may lie in a graph.
        self._version = {
            name: view.detach().requires_grad_() for name, view in _views(self._flat, self._layout).items()
        }

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
        with torch.set_grad_enabled(not self._recompute):
            weights = scaled(self._version, branch_scale)
            output_BTD = forward(weights, self._shape, self._span, inputs, tokens_BT=tokens_BT)
        _require_finite(key, "hidden states", [output_BTD])
        kept = None if self._recompute else output_BTD
        self._graphs[key] = _Graph(self._version, inputs, tokens_BT, kept, output_BTD.shape, branch_scale)
        return output_BTD.detach()

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> Finished:
        """The last stage's whole work: forward, loss and backward. Raises StageError, adding nothing."""
        inputs = self._leaf(key, inputs)
        if labels_BT.shape != inputs.shape[:2] or labels_BT.dtype != torch.int64:
            raise StageError(
                f"microbatch {key}: labels are {_kind(labels_BT)}, need int64 {list(inputs.shape[:2])}"
            )
        labels_BT = labels_BT.to(inputs.device)
        self._require_vocabulary(key, "labels", labels_BT)
        tokens_BT = self._beside(key, inputs, tokens_BT)
        with torch.enable_grad():
            logits_BTV = forward(self._version, self._shape, self._span, inputs, tokens_BT=tokens_BT)
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
                weights = scaled(graph.version, graph.branch_scale)
                output = forward(weights, self._shape, self._span, graph.inputs, tokens_BT=graph.tokens)
        # The gradient of this sum at `output` is `hidden_gradient` to the bit. Given to autograd as what
        # it is, it would make torch import sympy: 38 MiB in every peer that is not the last stage's.
        with torch.enable_grad():
            product = (output * hidden_gradient.to(output.device)).sum()
        return self._accumulate(key, graph.version, product, graph.inputs)

    def drop(self, key: Hashable) -> None:
        """Forget the graph of `key`, if it is open."""
        self._graphs.pop(key, None)

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        """What `use` makes of the sum since the last call: float32 [layout.size], zero in the padding, and
        zero again afterwards, whatever comes of it."""
        try:
            return use(self._gradient)
        finally:
            self._gradient.zero_()

    def _accumulate(
        self, key: Hashable, version: dict[str, Tensor], loss: Tensor, inputs: Tensor
    ) -> Tensor | None:
        leaves = list(version.values())
        if inputs.requires_grad:
            leaves.append(inputs)
        # Not .backward(): it would add to the accumulator before anyone could look at the values.
        gradients = torch.autograd.grad(loss, leaves)
        # One pass over all of them, one wait for the device; NaN or infinite if a value is.
        norms = torch.stack(torch._foreach_norm(gradients)).tolist()
        # No comparison with NaN is true. What goes on to the stage before is not summed here.
        if not (hypot(*norms[: len(version)]) <= MOST_NORM and isfinite(norms[-1])):
            raise StageError(f"microbatch {key}: gradient not finite, or too large to be summed")
        torch._foreach_add_(self._gradients, gradients[: len(version)])
        return gradients[-1] if inputs.requires_grad else None

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


def copied(weights: Tensor) -> Callable[[Tensor], None]:
    """What `StageCompute.publish` takes, of weights that lie elsewhere."""

    def write(flat: Tensor) -> None:
        flat.copy_(weights)

    return write


def _views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    return {
        entry.name: flat[entry.offset : entry.offset + entry.size].view(entry.shape)
        for entry in layout.entries
    }


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _require_finite(key: Hashable, what: str, tensors: list[Tensor] | tuple[Tensor, ...]) -> None:
    # Both bounds are NaN if any value is; torch.isfinite of every value takes eight times as long.
    bounds = [bound for tensor in tensors for bound in torch.aminmax(tensor)]
    if not torch.stack(bounds).isfinite().all():
        raise StageError(f"microbatch {key}: {what} not finite")
