"""x @ weight.T and its gradients, by the faster of torch's two CPU libraries.

torch multiplies float32 with MKL, which on AMD processors keeps to AVX2 kernels; oneDNN, which torch
carries too, takes the AVX-512 of any maker, with float32's full precision: measured on one AMD EPYC core,
2.1 times as fast (512 x 128 x 384). Without AVX-512, and on other devices, this is `functional.linear`.
So it is where the rows are as many as chance will have it, as an expert's tokens are: oneDNN makes a kernel
for each number of rows, which takes three to ten times as long as the product (128 x 64 x 88). And
where a product is small: oneDNN takes some 15 microseconds to begin, whatever it multiplies.

Beside a frozen matrix W [out, in] may stand LoRA's factors (arXiv:2106.09685, section 4.1), A [rank, in] and
B [out, rank]: a product is W x + alpha / rank B A x. They are merged only where weights leave a run: while it
trains, each open microbatch would keep a copy of the merged matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.parameters import factor_names, is_factor
from swarmnet.run.manifest import ModelShape

SMALL = 2**20
"""Multiplications of a product that is MKL's: with fewer oneDNN's three products of a layer took 2.2 to 5
times as long on that core (32 x 32 x 32 to 128 x 64 x 64), with more from 0.65 to 1.3 times."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[..., in] and [out, in] -> [..., out], in the number format of the weight."""
    return products(x, weight)[0]


def products(x: Tensor, *weights: Tensor, is_varied: bool = False) -> Sequence[Tensor]:
    """Of one x with several weights, to the bits of as many single ones, gradients too. `is_varied`: x has
    another number of rows each time."""
    x = x.to(weights[0].dtype)
    fits = x.device.type == "cpu" and x.dtype == weights[0].dtype == torch.float32 and not is_varied
    are_large = [fits and x.numel() * weight.shape[0] >= SMALL for weight in weights]
    if not any(are_large) or not _onednn_is_faster():
        return [functional.linear(x, weight) for weight in weights]
    if not all(are_large):
        return [linear(x, weight) for weight in weights]
    several: Sequence[Tensor] = _Products.apply(x, *weights)  # type: ignore[no-untyped-call]
    return several


def adapted(
    members: Mapping[str, Tensor], shape: ModelShape, x: Tensor, names: Sequence[str], is_varied: bool = False
) -> list[Tensor]:
    """The products of x [..., in] with these matrices of a layer and their factors, if they have some: of
    each [..., out]. `members`: by names without `.weight`; `is_varied`: as in `products`."""
    plain = products(x, *(members[name] for name in names), is_varied=is_varied)
    if not shape.lora.rank:
        return list(plain)
    return [
        product + shape.lora.scale * _through(members, name, x, is_varied)
        if f"{name}.lora_A" in members
        else product
        for name, product in zip(names, plain, strict=True)
    ]


def _through(members: Mapping[str, Tensor], name: str, x: Tensor, is_varied: bool) -> Tensor:
    """B A x."""
    (narrow,) = products(x, members[f"{name}.lora_A"], is_varied=is_varied)
    return products(narrow, members[f"{name}.lora_B"], is_varied=is_varied)[0]


def merged(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Global name -> float32 tensor of the plain model that computes the same: W + alpha / rank B A."""
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
    # The kernel behind torch.compile's linear layers on CPU; takes transposed operands as they are.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(context: _Context, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        context.save_for_backward(x, *weights)
        return tuple(_product(x, weight) for weight in weights)

    @staticmethod
    def backward(context: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = context.saved_tensors
        needs_x, *needs = context.needs_input_grad
        of_x: Tensor | None = None
        if needs_x:  # Added from the last one on, as autograd adds those of single products.
            for gradient, weight in zip(reversed(gradients), reversed(weights), strict=True):
                part = _product(gradient, weight.t())
                of_x = part if of_x is None else of_x.add_(part)
        x_t = x.flatten(0, -2).t()
        return of_x, *(
            _product(gradient.flatten(0, -2).t(), x_t) if needed else None
            for gradient, needed in zip(gradients, needs, strict=True)
        )
