"""Keep only the input of a layer and compute it again in the backward pass (Chen et al., arXiv:1604.06174).

The same function of torch, torch.utils.checkpoint, imports 828 modules, including torch._dynamo and sympy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.decoder import Rotation, RunLayer
from swarmnet.run.schema import ModelShape


def recomputed(run: RunLayer) -> RunLayer:
    """Return a function that computes the same layer, equal to the bit. It keeps only the layer's inputs for
    the backward pass, which calls `run` again."""

    def run_recomputed(
        members: Mapping[str, Tensor], shape: ModelShape, hidden_BTD: Tensor, rotation: Rotation
    ) -> Tensor:
        def layer(hidden_BTD: Tensor, *tensors: Tensor) -> Tensor:
            return run(dict(zip(members, tensors, strict=True)), shape, hidden_BTD, rotation)

        output: Tensor = _Recomputed.apply(layer, hidden_BTD, *members.values())  # type: ignore[no-untyped-call]
        return output

    return run_recomputed


class _Context(Protocol):
    layer: Callable[..., Tensor]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Recomputed(torch.autograd.Function):
    """The output of a layer for its input hidden_BTD and its weights, which are the `tensors`."""

    @staticmethod
    def forward(context: _Context, layer: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        context.layer = layer
        context.save_for_backward(*tensors)
        return layer(*tensors)

    @staticmethod
    def backward(context: _Context, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the layer again from its saved input and weights. Returns one item for each argument of
        `apply`: None for the function `layer`, then the gradient of each tensor, or None if it needs none.
        `gradient_BTD` is the gradient at the layer's output."""
        are_needed = context.needs_input_grad[1:]
        leaves = [
            tensor.detach().requires_grad_(is_needed)
            for tensor, is_needed in zip(context.saved_tensors, are_needed, strict=True)
        ]
        with torch.enable_grad():
            # The sum has gradient `gradient_BTD` at the output. To pass that to autograd imports sympy.
            product = (context.layer(*leaves) * gradient_BTD).sum()
        gradients = iter(torch.autograd.grad(product, [leaf for leaf in leaves if leaf.requires_grad]))
        return None, *(next(gradients) if is_needed else None for is_needed in are_needed)
