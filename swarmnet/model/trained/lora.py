"""LoRA (arXiv:2106.09685, section 4.1): beside a frozen matrix W [out, in] two factors, A [rank, in] and
B [out, rank], so that a product is W x + alpha / rank B A x. B begins at zero: the first products are W x.

Never merged while it is trained: each open microbatch would keep a copy of the merged matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarmnet.model.linear import linear, products
from swarmnet.model.parameters import factor_names, is_factor
from swarmnet.run.manifest import ModelShape


def adapted(
    members: Mapping[str, Tensor], shape: ModelShape, x: Tensor, names: Sequence[str]
) -> list[Tensor]:
    """The products of x [..., in] with these matrices of a layer and their factors, if they have some: of
    each [..., out]. `members`: by names without `.weight`."""
    plain = products(x, *(members[name] for name in names))
    if not shape.lora.rank:
        return list(plain)
    return [
        product + shape.lora.scale * _through(members, name, x) if f"{name}.lora_A" in members else product
        for name, product in zip(names, plain, strict=True)
    ]


def _through(members: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """B A x."""
    return linear(linear(x, members[f"{name}.lora_A"]), members[f"{name}.lora_B"])


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
