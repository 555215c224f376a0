"""Forward and backward of one stage, one microbatch at a time, on weights that change between them.

A graph keeps the version of the weights that it was built on, so a step never disturbs a microbatch under
way; where there is none, as in a run of one stage always, a new version takes the place of the old one in
memory (computing/whole_weights.py; on several devices computing/spread_weights.py). Gradients are of the
*summed* loss and add up in one flat vector of the same layout (computing/gradient_sum.py).

One thread at a time may use a StageCompute. Shape suffixes as in swarmnet/model/decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.computing.gradient_sum import Used
from swarmnet.model.computing.whole_weights import Rows, StageWeights, Tiles, WholeWeights
from swarmnet.model.experts.load import Routed
from swarmnet.model.flat_layout import NOTHING, Layout
from swarmnet.run.manifest import ModelShape, Span

__all__ = ["Finished", "StageCompute", "StageError", "Tiles", "copied"]


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
    version: object
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
        device: torch.device | None = None, frozen: Layout = NOTHING, weights: StageWeights | None = None,
    ) -> None:  # fmt: skip
        """`layout`: of what is trained; `frozen`: of what is not, which `freeze` gives; `weights`: on several
        devices this one's, else all, on `device`."""
        self._shape, self._span, self._layout = shape, span, layout
        self._frozen_layout = frozen
        self._crossing = shape.crossing
        self._forgets = computing.recompute == "stage"
        self._compiles = computing.compile and not shape.experts.count  # How many tokens these have varies.
        self._weights: StageWeights = weights or WholeWeights(
            shape, span, layout, computing, device or torch.device("cpu"), frozen
        )
        self._graphs: dict[Hashable, _Graph] = {}

    @property
    def device(self) -> torch.device:
        """Where hidden states are wanted; they may lie elsewhere."""
        return self._weights.device

    @property
    def open(self) -> int:
        """Graphs that wait for their backward pass."""
        return len(self._graphs)

    @property
    def routed(self) -> Routed:
        """Tokens of each expert since it began, by layer, of what was trained on; empty: there are no
        experts, or several devices compute. Any thread may read it."""
        return self._weights.routed

    def freeze(self, units: Tensor) -> None:
        """Compute with these weights, which are never trained, in the units of fixed_point: int32
        [frozen.size]. Before weights are published."""
        self._weights.freeze(units)

    def publish(self, tiles: Tiles) -> None:
        """Use these weights from the next forward on: written over those before, where no graph needs them
        any more. `tiles`: all of [layout.size]. ValueError before what is frozen is known."""
        self._weights.publish(tiles, self._needs)

    def train(self, layout: Layout) -> None:
        """Gradients are of these parameters alone from now on, and begin anew; before weights are published,
        or the next time they are."""
        self._weights.train(layout)

    def warm_up(self, sequences: int, tokens: int) -> None:
        """Compile what is to be compiled, for microbatches of so many sequences and tokens. May take minutes;
        before weights are published."""
        if not self._compiles:
            return
        assert isinstance(self._weights, WholeWeights), "peers/compute/stage_part.py allows no other"
        self._weights.compile_for(sequences, tokens)
        self.freeze(torch.zeros(self._frozen_layout.size, dtype=torch.int32))
        self.publish([(0, torch.zeros(self._layout.size, device=self._weights.device))])
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
        version, inputs = self._checked(key, inputs)
        tokens_BT = self._beside(key, inputs, tokens_BT)
        whole, rows = inputs.shape[:1], self._weights.rows(len(inputs))
        inputs, tokens_BT = self._leaf(inputs, rows), _of(tokens_BT, rows)
        with torch.set_grad_enabled(not self._forgets):
            output_BTD = self._weights.run(version, inputs, tokens_BT, branch_scale, rows)
        self._require_finite(key, "hidden states", output_BTD)
        kept = None if self._forgets else output_BTD
        shape = whole + output_BTD.shape[1:]
        self._graphs[key] = _Graph(version, inputs, tokens_BT, kept, shape, branch_scale)
        return output_BTD.detach()

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> Finished:
        """The last stage's whole work: forward, loss and backward. Raises StageError."""
        version, inputs = self._checked(key, inputs)
        labels_BT = self._checked_labels(key, labels_BT, inputs)
        tokens_BT = self._beside(key, inputs, tokens_BT)
        rows = self._weights.rows(len(inputs))
        labels_BT = labels_BT[rows.sequences]
        inputs, tokens_BT = self._leaf(inputs, rows), _of(tokens_BT, rows)
        with torch.enable_grad():
            logits_BTV = self._weights.run(version, inputs, tokens_BT, 1.0, rows)
            loss = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")
        self._require_finite(key, "loss", loss)
        hidden_gradient_BTD = self._accumulate(key, version, loss, inputs, rows)
        if not rows.count:
            return Finished(0.0, 0, None)
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
        output, rows = graph.output, self._weights.rows(len(hidden_gradient))
        if output is None:
            with torch.enable_grad():
                output = self._weights.run(
                    graph.version, graph.inputs, graph.tokens, graph.branch_scale, rows
                )
        hidden_gradient = hidden_gradient[rows.sequences]
        # The gradient of this sum at `output` is `hidden_gradient` to the bit. Given to autograd as what
        # it is, it would make torch import sympy: 38 MiB in every peer that is not the last stage's.
        with torch.enable_grad():
            product = (output * hidden_gradient.to(output.device)).sum()
        return self._accumulate(key, graph.version, product, graph.inputs, rows)

    def counts(self, sequences: int) -> bool:
        """Whether something of a microbatch of so many is computed here, where several devices share it."""
        return self._weights.rows(sequences).count

    def drop(self, key: Hashable) -> None:
        """Forget the graph of `key`, if it is open."""
        self._graphs.pop(key, None)

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        """As GradientSum.use."""
        return self._weights.use_gradient(use)

    def _needs(self, version: object) -> bool:
        """Whether an open graph was built on it."""
        return any(graph.version is version for graph in self._graphs.values())

    def _accumulate(
        self, key: Hashable, version: object, loss: Tensor, inputs: Tensor, rows: Rows
    ) -> Tensor | None:
        is_good = self._weights.add_gradient_of(version, loss if rows.count else 0.0 * loss, inputs)
        found, inputs.grad = inputs.grad, None  # Goes on to the stage before, and is not summed here.
        if found is not None:
            is_good = is_good and bool(torch.linalg.vector_norm(found).isfinite())
        if not self._weights.agreed(is_good):
            raise StageError(f"microbatch {key}: gradient not finite, or too large to be summed")
        return found if rows.count else None

    def _checked(self, key: Hashable, inputs: Tensor) -> tuple[object, Tensor]:
        """The newest weights, and a microbatch's inputs, which a stranger may have sent, if they fit."""
        version = self._weights.version
        if version is None:
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
        if self._span.has_embedding:
            self._require_vocabulary(key, "inputs", inputs)
        return version, inputs.detach().to(self._weights.device)

    def _checked_labels(self, key: Hashable, labels_BT: Tensor, inputs: Tensor) -> Tensor:
        if labels_BT.shape != inputs.shape[:2] or labels_BT.dtype != torch.int64:
            raise StageError(
                f"microbatch {key}: labels are {_kind(labels_BT)}, need int64 {list(inputs.shape[:2])}"
            )
        self._require_vocabulary(key, "labels", labels_BT)
        return labels_BT.to(self._weights.device)

    def _leaf(self, inputs: Tensor, rows: Rows) -> Tensor:
        """Those that are computed here, as a leaf of the graph."""
        here = inputs[rows.sequences]
        return here if self._span.has_embedding else here.detach().requires_grad_()

    def _beside(self, key: Hashable, inputs: Tensor, tokens_BT: Tensor | None) -> Tensor | None:
        """Check the tokens that hidden states behind a narrow boundary belong to; None: it takes none."""
        if self._span.first not in self._shape.boundary.after:
            return None
        if tokens_BT is None or tokens_BT.shape != inputs.shape[:2] or tokens_BT.dtype != torch.int64:
            came, need = "none" if tokens_BT is None else _kind(tokens_BT), list(inputs.shape[:2])
            raise StageError(f"microbatch {key}: tokens beside hidden states are {came}, need int64 {need}")
        self._require_vocabulary(key, "tokens beside hidden states", tokens_BT)
        return tokens_BT.to(inputs.device)

    def _require_finite(self, key: Hashable, what: str, tensor: Tensor) -> None:
        # Both bounds are NaN if any value is; torch.isfinite of every value takes eight times as long.
        if not self._weights.agreed(bool(torch.stack(torch.aminmax(tensor)).isfinite().all())):
            raise StageError(f"microbatch {key}: {what} not finite")

    def _require_vocabulary(self, key: Hashable, what: str, tokens_BT: Tensor) -> None:
        """Where they came to, in the machine's memory: to ask a GPU is to wait for it."""
        least, most = (int(bound) for bound in torch.aminmax(tokens_BT))
        if least < 0 or most >= self._shape.vocabulary:
            raise StageError(
                f"microbatch {key}: {what} hold token {least if least < 0 else most}, "
                f"the vocabulary is 0 to {self._shape.vocabulary - 1}"
            )


def copied(weights: Tensor) -> Tiles:
    """What `StageCompute.publish` takes, of weights that lie elsewhere."""
    return [(0, weights)]


def _of(tokens_BT: Tensor | None, rows: Rows) -> Tensor | None:
    return None if tokens_BT is None else tokens_BT[rows.sequences]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
