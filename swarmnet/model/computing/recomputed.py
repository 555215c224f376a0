"""Keep only the input of a layer and compute it again in the backward pass (Chen et al., arXiv:1604.06174).

The same function of torch, torch.utils.checkpoint, imports 828 modules, including torch._dynamo and sympy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.decoder import Rotation, RunLayer
from swarmnet.run.manifest import ModelShape


def recomputed(run: RunLayer) -> RunLayer:
    """Return the same layer, equal to the bit, that keeps only its input."""

    def run_again(
        members: Mapping[str, Tensor], shape: ModelShape, hidden_BTD: Tensor, rotation: Rotation
    ) -> Tensor:
        def layer(hidden_BTD: Tensor, *tensors: Tensor) -> Tensor:
            return run(dict(zip(members, tensors, strict=True)), shape, hidden_BTD, rotation)

        found: Tensor = _Again.apply(layer, hidden_BTD, *members.values())  # type: ignore[no-untyped-call]
        return found

    return run_again


class _Context(Protocol):
    layer: Callable[..., Tensor]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(context: _Context, layer: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        context.layer = layer
        context.save_for_backward(*tensors)
        return layer(*tensors)

    @staticmethod
    def backward(context: _Context, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        needs = context.needs_input_grad[1:]
        leaves = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(context.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad():
            # As in `StageCompute.backward`: passing the gradient directly makes torch import sympy.
            product = (context.layer(*leaves) * gradient_BTD).sum()
        found = iter(torch.autograd.grad(product, [leaf for leaf in leaves if leaf.requires_grad]))
        return None, *(next(found) if wanted else None for wanted in needs)
