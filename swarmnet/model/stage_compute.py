"""Compute forward and backward of one stage, one microbatch at a time, on weights that change between them.

A microbatch is *open* from its forward to its backward pass. Its *graph* is what autograd keeps of it, or
only the inputs if the stage is recomputed. Each published set of weights is a *version*. A graph keeps the
version that it was built on, so an optimizer step never affects an open microbatch. Without open graphs a new
version overwrites the old one. Gradients of the *summed* loss are added in one flat vector.

Several devices may hold a stage together and divide a microbatch's sequences (*rows*). At a *narrow boundary*
fewer numbers per token cross than the model is wide, and the stage after it also needs the tokens.

Only one thread at a time may use a StageCompute. Shape suffixes are as in `swarmnet/model/decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.computing.gradient_sum import Used
from swarmnet.model.computing.loss_scale import LossScale
from swarmnet.model.computing.whole_weights import Rows, StageWeights, Tiles, WholeWeights
from swarmnet.model.experts.load import Routed
from swarmnet.model.flat_layout import NOTHING, Layout
from swarmnet.model.sampling import IGNORE_INDEX
from swarmnet.run.manifest import Span
from swarmnet.run.schema import ModelShape

__all__ = ["LastStageResult", "StageCompute", "StageError", "Tiles", "Uncounted", "copied"]


class StageError(ValueError):
    """A microbatch cannot be computed. Anything that was added of it is finite and within the norm limit. The
    caller drops the microbatch and continues."""


@dataclass(frozen=True, slots=True)
class Uncounted:
    """Key of a microbatch that is computed to be compared: its gradient is not added to the sum."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class LastStageResult:
    """Result of a microbatch on the last stage."""

    loss_sum: float
    """Cross entropy in nats, summed over the labels that are not `IGNORE_INDEX`."""
    tokens: int
    """All tokens of the microbatch."""
    hidden_gradient: Tensor | None
    """Gradient of the summed loss at the stage's input, in its shape; None if the input is tokens."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """What is kept of an open microbatch."""

    version: object
    inputs: Tensor
    tokens: Tensor | None
    """[B, T] after a narrow boundary, else None."""
    output: Tensor | None
    """None if the stage recomputes."""
    output_shape: torch.Size
    branch_scale: float


class StageCompute:
    """The model's slice `span`, with its open graphs and its summed gradient."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        span: Span,
        layout: Layout,
        computing: Computing = PLAIN,
        device: torch.device | None = None,
        frozen: Layout = NOTHING,
        weights: StageWeights | None = None,
    ) -> None:
        """Create the stage. `layout` has the trained parameters, and `frozen` the others, which `freeze`
        sets. `weights` is this device's part if several hold the stage; None if `device` holds all of it."""
        self._shape = shape
        self._span = span
        self._last_span = span.end or span
        """The layers before the loss: those of `finish`."""
        self._layout = layout
        self._frozen_layout = frozen
        self._values_per_token = shape.crossing
        self._recomputes_stage = computing.activation_checkpointing == "stage"
        # The number of tokens per expert varies.
        self._compiles = computing.compile and not shape.experts.num_experts
        self._weights: StageWeights = weights or WholeWeights(
            shape=shape,
            span=span,
            layout=layout,
            computing=computing,
            device=device or torch.device("cpu"),
            frozen=frozen,
        )
        self._graphs: dict[Hashable, _Graph] = {}
        self._loss_scale = LossScale(computing.dtype == "fp16")

    @property
    def device(self) -> torch.device:
        """Device for hidden states; they may also come from another one."""
        return self._weights.device

    @property
    def open(self) -> int:
        """Number of graphs that wait for their backward pass."""
        return len(self._graphs)

    @property
    def routed(self) -> Routed:
        """Number of trained tokens of each expert by layer, for any thread. Empty on several devices."""
        return self._weights.routed

    def freeze(self, units: Tensor) -> None:
        """Set frozen weights, int32 [frozen.size] in units of `fixed_point`. Called before `publish`."""
        self._weights.freeze(units)

    def publish(self, tiles: Tiles) -> None:
        """Use new weights from the next forward pass on. `tiles` cover the flat vector [layout.size]. Old
        ones are overwritten unless an open graph needs them. Raises ValueError without frozen weights."""
        self._weights.publish(tiles, self._is_in_use)

    def train(self, layout: Layout) -> None:
        """Sum gradients of these parameters only, from zero. Called before `publish`, which applies it."""
        self._weights.train(layout)

    def warm_up(self, sequences: int, tokens: int) -> None:
        """Compile the layers for microbatches of [sequences, tokens] by computing one on zero weights. May
        take minutes. Does nothing without `compile`. Called before real weights are published."""
        if not self._compiles:
            return
        assert isinstance(self._weights, WholeWeights), "peers/compute/stage_part.py allows no other"
        self._weights.compile_for(sequences, tokens)
        self.freeze(torch.zeros(self._frozen_layout.size, dtype=torch.int32))
        self.publish([(0, torch.zeros(self._layout.size, device=self._weights.device))])
        tokens_BT = torch.zeros(sequences, tokens, dtype=torch.int64)
        inputs = tokens_BT
        if not self._span.has_embedding:
            inputs = torch.zeros(sequences, tokens, self._values_per_token)
        if not self._span.has_head:
            self.backward("warm up", self.forward("warm up", inputs, tokens_BT=tokens_BT))
        if self._last_span.has_head:
            if self._span.end is not None:
                inputs = torch.zeros(sequences, tokens, self._values_per_token)
            self.finish("warm up", inputs, tokens_BT, tokens_BT)
        self.use_gradient(lambda _gradient: None)  # Discards the sum.

    def forward(
        self, key: Hashable, inputs: Tensor, branch_scale: float = 1.0, tokens_BT: Tensor | None = None
    ) -> Tensor:
        """Compute and return the stage's hidden states, and keep the graph for `backward` under `key`.
        `inputs` are tokens (first stage) or hidden states; after a narrow boundary `tokens_BT` is needed too.
        `branch_scale` multiplies what attention and feed-forward add to the hidden states.
        Raises StageError if the inputs do not fit the model, the result is not finite, or `key` is open."""
        if key in self._graphs:
            raise StageError(f"microbatch {key} is already open in this stage")
        version, inputs = self._check_inputs(key, inputs, self._span)
        tokens_BT = self._check_tokens(key, inputs, tokens_BT)
        sequences = len(inputs)
        rows = self._weights.rows(sequences)
        inputs = _local_leaf(inputs, rows, self._span)  # From here on only the sequences of this device.
        tokens_BT = _local_tokens(tokens_BT, rows)
        with torch.set_grad_enabled(not self._recomputes_stage):
            output_BTD = self._weights.run(version, inputs, tokens_BT, branch_scale, rows)
        self._require_finite(key, "hidden states", output_BTD)
        kept_output = None if self._recomputes_stage else output_BTD
        output_shape = torch.Size((sequences, *output_BTD.shape[1:]))  # That of the whole microbatch.
        self._graphs[key] = _Graph(version, inputs, tokens_BT, kept_output, output_shape, branch_scale)
        return output_BTD.detach()

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> LastStageResult:
        """Compute forward pass, loss and backward pass of the last stage, or of the model's last layers if
        the stage has both ends. Returns the loss and the gradient at the inputs; no graph is kept. Raises
        StageError if the inputs or labels do not fit the model, or if the loss or a gradient is not finite or
        too large."""
        version, inputs = self._check_inputs(key, inputs, self._last_span)
        labels_BT = self._check_labels(key, labels_BT, inputs)
        tokens_BT = self._check_tokens(key, inputs, tokens_BT)
        rows = self._weights.rows(len(inputs))
        labels_BT = labels_BT[rows.sequences]  # From here on only the sequences of this device.
        inputs, tokens_BT = _local_leaf(inputs, rows, self._last_span), _local_tokens(tokens_BT, rows)
        with torch.enable_grad():
            logits_BTV = self._weights.run(
                version, inputs, tokens_BT, branch_scale=1.0, rows=rows, end=self._span.end
            )
            loss = functional.cross_entropy(
                logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
            )
        self._require_finite(key, "loss", loss)
        scale = self._loss_scale.factor(1.0)  # No gradient at a logit is larger.
        hidden_gradient_BTD = self._accumulate(key, version, loss, inputs, rows, scale)
        if not rows.count:  # This device only made the same calls as the others.
            return LastStageResult(loss_sum=0.0, tokens=0, hidden_gradient=None)
        return LastStageResult(loss.item(), labels_BT.numel(), hidden_gradient_BTD)

    def backward(self, key: Hashable, hidden_gradient: Tensor) -> Tensor | None:
        """Add the parameters' gradients to the sum. `hidden_gradient` is the gradient at the output that
        `forward` returned: float32, of the whole microbatch. Returns the gradient at the input; None in the
        first stage. Removes the graph in any case. Raises StageError if `key` is not open, the shape is
        wrong, or the gradient is too large or not finite."""
        graph = self._graphs.pop(key, None)
        if graph is None:
            raise StageError(f"microbatch {key} is not open in this stage")
        if hidden_gradient.shape != graph.output_shape or hidden_gradient.dtype != torch.float32:
            raise StageError(
                f"microbatch {key}: gradient is {_describe(hidden_gradient)}, "
                f"need float32 {list(graph.output_shape)}"
            )
        output, rows = graph.output, self._weights.rows(len(hidden_gradient))
        if output is None:  # Only the inputs were kept.
            with torch.enable_grad():
                output = self._weights.run(
                    graph.version, graph.inputs, graph.tokens, graph.branch_scale, rows
                )
        scale = 1.0
        if self._loss_scale.is_used:
            scale = self._loss_scale.factor(float(hidden_gradient.abs().amax()))
        hidden_gradient = hidden_gradient[rows.sequences]
        # The gradient of this sum at `output` is `hidden_gradient` to the bit. Passing it to autograd
        # directly would make torch import sympy: 38 MiB in every peer that is not of the last stage.
        with torch.enable_grad():
            product = (output * hidden_gradient.to(output.device)).sum()
        return self._accumulate(key, graph.version, product, graph.inputs, rows, scale)

    def counts(self, sequences: int) -> bool:
        """Return whether this device computes a part of a microbatch with this number of sequences."""
        return self._weights.rows(sequences).count

    def drop(self, key: Hashable) -> None:
        """Drop the graph of `key`, if it is open."""
        self._graphs.pop(key, None)

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        """Return `use(gradient)` for the gradient [layout.size] summed since the last call, and zero it."""
        return self._weights.use_gradient(use)

    def _is_in_use(self, version: object) -> bool:
        """Return whether an open graph was built on this version."""
        return any(graph.version is version for graph in self._graphs.values())

    def _accumulate(
        self, key: Hashable, version: object, loss: Tensor, inputs: Tensor, rows: Rows, scale: float
    ) -> Tensor | None:
        """Run the backward pass from `scale` times `loss`, and add the parameters' gradients to the sum,
        unless the key is `Uncounted` (only if one device holds the stage). Returns the gradient at `inputs`;
        None for tokens, and on a device whose result does not count. Raises StageError if a gradient is not
        finite or too large on any device."""
        # All devices must run the same backward pass.
        counted_loss = loss * (scale if rows.count else 0.0)
        if isinstance(key, Uncounted):
            torch.autograd.backward(counted_loss, inputs=[inputs])
            is_good = True
        else:
            is_good = self._weights.add_gradient_of(version, counted_loss, inputs, scale)
        # The gradient at the inputs is sent to the stage before and is not summed here.
        input_gradient, inputs.grad = inputs.grad, None
        if input_gradient is not None:
            input_gradient /= scale
            is_good = is_good and bool(torch.linalg.vector_norm(input_gradient).isfinite())
        is_good = self._weights.agreed(is_good)
        self._loss_scale.record(is_good)
        if not is_good:
            raise StageError(f"microbatch {key}: gradient not finite, or too large to be summed")
        return input_gradient if rows.count else None

    def _check_inputs(self, key: Hashable, inputs: Tensor, span: Span) -> tuple[object, Tensor]:
        """Check inputs of the layers `span`, which may come from an untrusted peer. Returns the newest
        version of the weights, and the inputs on the weights' device. Raises StageError if dtype, shape or
        tokens do not fit."""
        version = self._weights.version
        if version is None:
            raise ValueError("publish weights first")
        if span.has_embedding:
            kind, fits = "int64 tokens [B, T]", inputs.dtype == torch.int64 and inputs.dim() == 2
        else:
            kind = f"float32 hidden states [B, T, {self._values_per_token}]"
            fits = inputs.dtype == torch.float32 and inputs.shape[2:] == (self._values_per_token,)
        if not fits:
            raise StageError(f"microbatch {key}: inputs are {_describe(inputs)}, this stage takes {kind}")
        sequences, tokens = inputs.shape[:2]
        if sequences == 0 or not 0 < tokens <= self._shape.max_position_embeddings:
            raise StageError(
                f"microbatch {key}: {sequences} sequences of {tokens} tokens; "
                f"the model takes 1 to {self._shape.max_position_embeddings} tokens"
            )
        if span.has_embedding:
            self._require_vocabulary(key, "inputs", inputs)
        return version, inputs.detach().to(self._weights.device)

    def _check_labels(self, key: Hashable, labels_BT: Tensor, inputs: Tensor) -> Tensor:
        """Return the labels on the weights' device. Raises StageError if they do not fit the inputs."""
        if labels_BT.shape != inputs.shape[:2] or labels_BT.dtype != torch.int64:
            raise StageError(
                f"microbatch {key}: labels are {_describe(labels_BT)}, need int64 {list(inputs.shape[:2])}"
            )
        self._require_vocabulary(key, "labels", labels_BT.masked_fill(labels_BT == IGNORE_INDEX, 0))
        return labels_BT.to(self._weights.device)

    def _check_tokens(self, key: Hashable, inputs: Tensor, tokens_BT: Tensor | None) -> Tensor | None:
        """Check the tokens of hidden states after a narrow boundary, and return them on the inputs' device.
        Returns None if the stage needs none. Raises StageError if they do not fit the inputs."""
        if self._span.first not in self._shape.boundary.after:
            return None
        if tokens_BT is None or tokens_BT.shape != inputs.shape[:2] or tokens_BT.dtype != torch.int64:
            got, need = "none" if tokens_BT is None else _describe(tokens_BT), list(inputs.shape[:2])
            raise StageError(f"microbatch {key}: tokens beside hidden states are {got}, need int64 {need}")
        self._require_vocabulary(key, "tokens beside hidden states", tokens_BT)
        return tokens_BT.to(inputs.device)

    def _require_finite(self, key: Hashable, what: str, tensor: Tensor) -> None:
        # Both bounds are NaN if any value is; torch.isfinite of every value takes eight times as long.
        if not self._weights.agreed(bool(torch.stack(torch.aminmax(tensor)).isfinite().all())):
            raise StageError(f"microbatch {key}: {what} not finite")

    def _require_vocabulary(self, key: Hashable, what: str, tokens_BT: Tensor) -> None:
        """Raise StageError if a token is outside the vocabulary. `what` names the tokens in the message.
        Called before they are moved to a GPU, because reading the result there would wait for it."""
        smallest, largest = (int(bound) for bound in torch.aminmax(tokens_BT))
        if smallest < 0 or largest >= self._shape.vocab_size:
            raise StageError(
                f"microbatch {key}: {what} hold token {smallest if smallest < 0 else largest}, "
                f"the vocabulary is 0 to {self._shape.vocab_size - 1}"
            )


def copied(weights: Tensor) -> Tiles:
    """Return the argument of `StageCompute.publish` for weights in one tensor."""
    return [(0, weights)]


def _local_leaf(inputs: Tensor, rows: Rows, span: Span) -> Tensor:
    """Return the sequences that this device computes, as a leaf of the graph."""
    local_inputs = inputs[rows.sequences]
    return local_inputs if span.has_embedding else local_inputs.detach().requires_grad_()


def _local_tokens(tokens_BT: Tensor | None, rows: Rows) -> Tensor | None:
    return None if tokens_BT is None else tokens_BT[rows.sequences]


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
