"""A stage of routed experts: it answers rows, and rows with a gradient, each by itself (routed_trunk.py).

Between the two nothing is kept: what experts say of rows is computed again for their gradient, with the
weights of then. Shape suffixes: S rows, one expert's after the other's, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.computing.whole_weights import WholeWeights
from swarmnet.model.decoder import by_layer
from swarmnet.model.experts.mixture import feed_forward
from swarmnet.model.flat_layout import Layout
from swarmnet.model.stage_compute import StageCompute, StageError
from swarmnet.run.manifest import ModelShape, Span


class ExpertCompute(StageCompute):
    """One group of experts, of the layers of one stage. No microbatch goes through it."""

    def __init__(
        self, shape: ModelShape, span: Span, layout: Layout, computing: Computing = PLAIN,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self._whole = WholeWeights(shape, span, layout, computing, device or torch.device("cpu"))
        super().__init__(shape, span, layout, computing, device, weights=self._whole)
        assert span.experts is not None, "else it is no stage of experts"
        self._experts = span.experts

    def answer(self, layer: int, counts: Sequence[int], rows_SD: Tensor) -> Tensor:
        """float32 [S, D]: what the experts say of their rows, of which each has so many. Raises StageError
        where that is not finite."""
        with torch.no_grad():
            said_SD = self._said(layer, counts, rows_SD.to(self._weights.device))
        self._require_finite(f"of layer {layer}", "what experts say", said_SD)
        return said_SD

    def answer_backward(
        self, layer: int, counts: Sequence[int], rows_SD: Tensor, gradient_SD: Tensor, *, adds: bool
    ) -> Tensor:
        """float32 [S, D]: the gradient at the rows, given that at what is said of them. `adds`: add the
        gradients of the experts as well. Raises StageError where one is not finite, or too large."""
        device = self._weights.device
        leaf = rows_SD.detach().to(device).requires_grad_()
        with torch.enable_grad():
            worth = (self._said(layer, counts, leaf) * gradient_SD.to(device)).sum()
        is_good = True
        if adds:
            is_good = self._weights.add_gradient_of(self._weights.version, worth, leaf)
            for expert, count in zip(self._experts, counts, strict=True):
                self._whole.routed[layer][expert] += count
        else:
            torch.autograd.backward(worth, inputs=[leaf])
        found = leaf.grad
        if found is None or not is_good or not torch.linalg.vector_norm(found).isfinite():
            raise StageError(f"layer {layer}: gradient of experts not finite, or too large to be summed")
        return found

    def _said(self, layer: int, counts: Sequence[int], rows_SD: Tensor) -> Tensor:
        version = self._whole.version
        if version is None:
            raise ValueError("publish weights first")
        return said_by(by_layer(version)[layer], self._shape, self._experts, counts, rows_SD)


def said_by(
    members: Mapping[str, Tensor], shape: ModelShape, experts: Iterable[int], counts: Sequence[int],
    rows_SD: Tensor,
) -> Tensor:  # fmt: skip
    """float32 [S, D]: what the experts of a layer, whose weights `members` has, say of their rows."""
    start, said = 0, []
    for expert, count in zip(experts, counts, strict=True):
        rows = rows_SD[start : start + count]
        said.append(feed_forward(members, shape, f"mlp.experts.{expert}.", rows, is_varied=True))
        start += count
    return torch.cat(said).float()
