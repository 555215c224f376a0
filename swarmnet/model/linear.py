"""Compute x @ weight.T and its gradients with the faster of torch's two CPU libraries.

MKL, the default of torch for float32, is limited to AVX2 kernels on AMD processors. The other library,
oneDNN, uses AVX-512 on all processors, with full float32 precision. It was 2.1 times as fast on one AMD EPYC
core (512 x 128 x 384). Without AVX-512, and on other devices, this is `functional.linear`. MKL is also used
if the number of rows varies, as for an expert's tokens. The reason is that oneDNN compiles a kernel for each
number of rows. That takes three to ten times as long as the product (128 x 64 x 88). Small products use MKL
too, because each call of oneDNN starts with some 15 microseconds.

A frozen matrix W [out, in] may have LoRA factors (arXiv:2106.09685, section 4.1), A [rank, in] and B [out,
rank]. The product is then W x + alpha / rank B A x. Factors are merged only where weights leave a run. During
training each open microbatch would keep a copy of the merged matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.parameters import factor_names, is_factor
from swarmnet.run.schema import ModelShape

SMALL = 2**20
"""Products with fewer multiplications use MKL (measured from 32 x 32 x 32 to 128 x 64 x 64). Below this size
oneDNN's three products of a layer took 2.2 to 5 times as long on that core, above it 0.65 to 1.3."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return [..., out] from [..., in] and [out, in], in the number format of the weight."""
    return products(x, weight)[0]


def products(x: Tensor, *weights: Tensor, is_varied: bool = False) -> Sequence[Tensor]:
    """Return x @ weight.T for each weight, by oneDNN if that is faster. The products and their gradients have
    the same bits as if each weight came alone. `is_varied` says that x has another number of rows each time;
    oneDNN would then compile a kernel for each."""
    x = x.to(weights[0].dtype)
    is_float32_on_cpu = x.device.type == "cpu" and x.dtype == weights[0].dtype == torch.float32
    may_use_onednn = is_float32_on_cpu and not is_varied
    are_large = [may_use_onednn and x.numel() * weight.shape[0] >= SMALL for weight in weights]
    if not any(are_large) or not _onednn_is_faster():
        return [functional.linear(x, weight) for weight in weights]
    if not all(are_large):
        return [linear(x, weight) for weight in weights]
    results: Sequence[Tensor] = _Products.apply(x, *weights)  # type: ignore[no-untyped-call]
    return results


def lora_products(
    members: Mapping[str, Tensor], shape: ModelShape, x: Tensor, names: Sequence[str], is_varied: bool = False
) -> list[Tensor]:
    """Return the products [..., out] of x [..., in] with the named matrices of a layer. The product with the
    LoRA factors of a matrix is added, if it has some. `members` maps names without `.weight` to weights.
    `is_varied` says that x has another number of rows each time."""
    plain = products(x, *(members[name] for name in names), is_varied=is_varied)
    if not shape.lora.rank:
        return list(plain)
    return [
        product + shape.lora.scale * _factor_product(members, name, x, is_varied)
        if f"{name}.lora_A" in members
        else product
        for name, product in zip(names, plain, strict=True)
    ]


def _factor_product(members: Mapping[str, Tensor], name: str, x: Tensor, is_varied: bool) -> Tensor:
    """Return B A x, where A and B are the LoRA factors of the matrix `name`."""
    (narrow,) = products(x, members[f"{name}.lora_A"], is_varied=is_varied)
    return products(narrow, members[f"{name}.lora_B"], is_varied=is_varied)[0]


def merged(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return float32 tensors without LoRA factors, by global name. A matrix becomes W + alpha / rank B A."""
    if not shape.lora.rank:
        return dict(weights)
    plain = {name: tensor for name, tensor in weights.items() if not is_factor(name)}
    for name, tensor in plain.items():
        down, up = factor_names(name)
        if down in weights:
            product = weights[up].to(torch.float64) @ weights[down].to(torch.float64)
            plain[name] = (tensor + shape.lora.scale * product).to(torch.float32)
    return plain


@cache
def _onednn_is_faster() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def _product(x: Tensor, weight: Tensor) -> Tensor:
    # The kernel of torch.compile's linear layers on CPU; it accepts transposed operands as they are.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Products(torch.autograd.Function):
    """The products of one x [..., in] with several weights [out, in], computed by oneDNN."""

    @staticmethod
    def forward(context: _Context, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        context.save_for_backward(x, *weights)
        return tuple(_product(x, weight) for weight in weights)

    @staticmethod
    def backward(context: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of each weight (None if not needed) from those of the products. The
        gradient of x is a sum over the products, added from the last one on as autograd does."""
        x, *weights = context.saved_tensors
        is_x_needed, *are_weights_needed = context.needs_input_grad
        gradient_of_x: Tensor | None = None
        if is_x_needed:
            for gradient, weight in zip(reversed(gradients), reversed(weights), strict=True):
                part = _product(gradient, weight.t())
                gradient_of_x = part if gradient_of_x is None else gradient_of_x.add_(part)
        x_t = x.flatten(0, -2).t()
        return gradient_of_x, *(
            _product(gradient.flatten(0, -2).t(), x_t) if is_needed else None
            for gradient, is_needed in zip(gradients, are_weights_needed, strict=True)
        )
