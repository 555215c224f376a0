"""A feed-forward layer with several experts, of which each token uses a few (arXiv:1701.06538), as in
Qwen3-MoE.

A router gives every token a share of each expert. The largest `top_k` shares, normalized to sum to one,
weight the outputs of these experts. No token is dropped, however many choose the same expert. A balance loss
(arXiv:2101.03961, equation 4) keeps the load even. Its gradient is added within the layer, so that no stage
needs anything from the others for it.

Shape suffixes: N tokens, D width, F feed-forward, E experts, A active experts of a token, S tokens of one
expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.linear import linear, lora_products
from swarmnet.run.schema import ModelShape


def mixture(
    members: Mapping[str, Tensor], shape: ModelShape, x_ND: Tensor, routed: list[int] | None = None
) -> Tensor:
    """Return what the experts of a layer add to its tokens, [N, D]. `members` are its weights by member name.
    In training, the tokens of each expert are added to `routed`, and the balance loss gets its gradient."""
    choice = choose(members["mlp.gate"], shape, x_ND)
    weights_NA, chosen_NA = choice.weights, choice.chosen
    sum_ND = torch.zeros_like(x_ND)
    for expert in range(shape.experts.num_experts):
        # Token numbers, and at which of the token's choices the expert is.
        tokens_S, choices_S = (chosen_NA == expert).nonzero(as_tuple=True)
        if routed is not None and torch.is_grad_enabled():
            routed[expert] += len(tokens_S)
        output_SD = feed_forward(members, shape, f"mlp.experts.{expert}.", x_ND[tokens_S], is_varied=True)
        sum_ND.index_add_(0, tokens_S, output_SD * weights_NA[tokens_S, choices_S, None])
    if not (torch.is_grad_enabled() and shape.experts.aux_loss_coef):
        return sum_ND
    balance_loss = unevenness(shape, choice)
    sum_with_loss_ND: Tensor = _WithLoss.apply(sum_ND, balance_loss)  # type: ignore[no-untyped-call]
    return sum_with_loss_ND


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """The routing of a layer's tokens."""

    shares: Tensor
    """[N, E]: share of each expert, summing to one."""
    weights: Tensor
    """[N, A]: weights of the chosen experts, normalized to sum to one."""
    chosen: Tensor
    """[N, A]: numbers of the chosen experts."""


def choose(gate_ED: Tensor, shape: ModelShape, x_ND: Tensor, without: Sequence[int] = ()) -> ExpertRouting:
    """Choose each token's experts with the router's matrix, but none in `without`, which no peer serves."""
    logits_NE = linear(x_ND, gate_ED).float()
    if without:
        is_missing_E = torch.zeros(shape.experts.num_experts, dtype=torch.bool, device=x_ND.device)
        is_missing_E[list(without)] = True
        logits_NE = logits_NE.masked_fill(is_missing_E, -inf)
    shares_NE = logits_NE.softmax(dim=-1)
    available = shape.experts.num_experts - len(without)
    weights_NA, chosen_NA = shares_NE.topk(min(shape.experts.top_k, available), dim=-1)
    weights_NA = (weights_NA / weights_NA.sum(dim=-1, keepdim=True)).to(x_ND.dtype)
    return ExpertRouting(shares_NE, weights_NA, chosen_NA)


def feed_forward(
    members: Mapping[str, Tensor], shape: ModelShape, which: str, x: Tensor, is_varied: bool = False
) -> Tensor:
    """Compute SwiGLU (arXiv:2002.05202), [..., D] to [..., D]. `which` is the prefix of its weights' names.
    `is_varied` says that x has another number of rows each time (linear.py)."""
    gate_F, up_F = lora_products(members, shape, x, [f"{which}gate_proj", f"{which}up_proj"], is_varied)
    (down,) = lora_products(members, shape, functional.silu(gate_F) * up_F, [f"{which}down_proj"], is_varied)
    return down


def unevenness(shape: ModelShape, choice: ExpertRouting) -> Tensor:
    """Return the balance loss of one layer, summed over the tokens. At perfect balance the losses of all
    layers add up to `aux_loss_coef` per token. The load, a count of choices, has no gradient; shares have."""
    shares_NE, chosen_NA = choice.shares, choice.chosen
    tokens, count = shares_NE.shape
    load_E = torch.bincount(chosen_NA.flatten(), minlength=count) / chosen_NA.numel()
    scale = shape.experts.aux_loss_coef * tokens * count / shape.num_hidden_layers
    return scale * (load_E * shares_NE.mean(dim=0)).sum()


class _WithLoss(torch.autograd.Function):
    """Return `x` unchanged. In the backward pass `loss` gets gradient 1, as a part of the model's loss."""

    @staticmethod
    def forward(context: object, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())
