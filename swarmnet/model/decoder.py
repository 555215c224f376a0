"""The decoder: the first values of its parameters (`parameters.py`) and its forward pass for any slice of
layers.

It has RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), grouped-query attention
(arXiv:2305.13245) and SwiGLU (arXiv:2002.05202), optionally QK-norm (as in Qwen3), biases (as in Qwen2) and
experts (`experts/mixture.py`). Parameters have the names of Hugging Face, so that a checkpoint is an export.
Embedding and head are tied only if one stage has both. The forward pass is a function of a mapping from names
to tensors, and changes nothing but the cache of keys and values, if it is given one.

Matrix products use the number format of the matrices. Hidden states between layers, norms and results are
float32.

Shape suffixes: B sequences, T tokens, S tokens with cached ones, D width, H heads. K is key-value heads, W
head width, F feed-forward, V vocabulary, R numbers that cross a narrow boundary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import pi, prod
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.boundary import directions, embedded, enter, leave, written
from swarmnet.model.draws import normal
from swarmnet.model.experts.mixture import feed_forward, mixture
from swarmnet.model.fixed_point import UNIT, to_units
from swarmnet.model.flat_layout import Layout
from swarmnet.model.linear import linear, lora_products
from swarmnet.model.parameters import (
    BIAS,
    BRANCH_ENDS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    factor_names,
    init_draw_name,
    initial_std,
    parameter_shapes,
)
from swarmnet.run.manifest import Span
from swarmnet.run.schema import ModelShape, RopeScaling


def initial_units(shape: ModelShape, span: Span, layout: Layout, seed: int) -> Tensor:
    """Return the run's first weights in fixed point: int32 [layout.size], zero in the padding. A parameter
    depends only on the run's seed and its own global name, so it starts equal however the model is cut into
    stages. Integer draws (`draws.py`) and one correctly rounded product also make it equal on every
    processor. Raises ValueError if `layout` does not fit the model."""
    shapes = parameter_shapes(shape, span)
    units = torch.zeros(layout.size, dtype=torch.int32)
    for entry in layout.entries:
        if shapes[entry.name] != entry.shape:
            raise ValueError(f"{entry.name}: layout has {entry.shape}, model {shapes[entry.name]}")
        units[entry.place] = drawn_units(shape, entry.name, entry.shape, seed)
    return units


def drawn_units(shape: ModelShape, name: str, size: tuple[int, ...], seed: int) -> Tensor:
    """Return one parameter's first values in fixed point: int32 [its size]. A gain of a norm is 1, and a
    matrix is drawn from a normal distribution. Biases and the second LoRA factor of a matrix are zero."""
    count = prod(size)
    if name.endswith(BIAS):
        return torch.zeros(count, dtype=torch.int32)
    if len(size) == 1:
        return torch.full((count,), round(1 / UNIT), dtype=torch.int32)
    deviation = initial_std(shape, name, size)
    if not deviation:  # The second LoRA factor.
        return torch.zeros(count, dtype=torch.int32)
    return to_units(normal(count, seed, init_draw_name(shape, name)).mul_(deviation))


@dataclass(slots=True)
class Cache:
    """Keys and values of previous tokens for each layer, so that generation takes linear time."""

    length: int = 0
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer: int, key_BKTW: Tensor, value_BKTW: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return those of all tokens."""
        if layer in self.layers:
            old_key_BKSW, old_value_BKSW = self.layers[layer]
            key_BKTW = torch.cat((old_key_BKSW, key_BKTW), dim=2)
            value_BKTW = torch.cat((old_value_BKSW, value_BKTW), dim=2)
        self.layers[layer] = key_BKTW, value_BKTW
        return key_BKTW, value_BKTW


def scaled(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return weights whose attention and feed-forward add `scale` times as much to the hidden states."""
    if scale == 1.0:
        return dict(weights)
    ends = (*BRANCH_ENDS, *(factor_names(end)[1] for end in BRANCH_ENDS))
    return {name: tensor * scale if name.endswith(ends) else tensor for name, tensor in weights.items()}


Rotation: TypeAlias = tuple[Tensor, Tensor]
"""The pair (cos_TW, sin_TW)."""


class RunLayer(Protocol):
    """Computes one layer: `one_layer`, or an equivalent (`computing/recomputed.py`)."""

    def __call__(
        self, members: Mapping[str, Tensor], shape: ModelShape, hidden_BTD: Tensor, rotation: Rotation, /
    ) -> Tensor: ...


def forward(
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    span: Span,
    inputs: Tensor,
    cache: Cache | None = None,
    tokens_BT: Tensor | None = None,
    run_layers: Mapping[int, RunLayer] | None = None,
) -> Tensor:
    """Run the layers of `span`. `inputs` are tokens (int64 [B, T]) if it has the embedding, else hidden_BTD.
    Returns logits_BTV if the span has the head, else hidden_BTD. With a filled cache, T must be 1.
    `run_layers` replaces `one_layer` by layer number, without a cache. At narrow boundaries fewer numbers per
    token cross: inputs and result are then [B, T, R], and a span without embedding needs `tokens_BT`."""
    hidden_BTD = inputs
    if span.has_embedding:
        tokens_BT, hidden_BTD = inputs, embedded(weights[EMBEDDING], shape, inputs)
    start, length = cache.length if cache is not None else 0, hidden_BTD.shape[1]
    rotation = rotation_of(shape, start, length, hidden_BTD.device)
    weights_by_layer = by_layer(weights)
    for layer in range(span.first, span.stop):
        if layer in shape.boundary.after:  # A narrow boundary lies between layer - 1 and this layer.
            assert tokens_BT is not None, "hidden states behind a narrow boundary do not tell their tokens"
            if layer > span.first:  # The boundary is inside this span: narrow the hidden states here.
                hidden_BTD = leave(weights, shape, layer, hidden_BTD, tokens_BT)
            hidden_BTD = enter(weights, shape, layer, hidden_BTD, tokens_BT)  # From [B, T, R].
        members = weights_by_layer[layer] | directions(shape, layer, hidden_BTD.device)
        if cache is not None:
            hidden_BTD = one_layer(members, shape, hidden_BTD, rotation, partial(cache.extend, layer))
        else:
            run_layer: RunLayer = run_layers[layer] if run_layers is not None else one_layer
            hidden_BTD = run_layer(members, shape, hidden_BTD, rotation)
    if cache is not None:
        cache.length += length
    if span.has_head:
        return logits(weights, shape, hidden_BTD)
    if span.stop in shape.boundary.after:  # A narrow boundary ends this span: send [B, T, R].
        assert tokens_BT is not None
        hidden_BTD = leave(weights, shape, span.stop, hidden_BTD, tokens_BT)
    return hidden_BTD


def by_layer(weights: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return for each layer its tensors by member name, as in `mlp.up_proj`."""
    layers: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        if name.startswith("model.layers."):
            _, _, layer, member = name.split(".", 3)
            layers[int(layer)][member.removesuffix(".weight")] = tensor
    return layers


def one_layer(
    members: Mapping[str, Tensor],
    shape: ModelShape,
    hidden_BTD: Tensor,
    rotation: Rotation,
    extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    routed: list[int] | None = None,
) -> Tensor:
    """Run one layer and return its hidden states, [B, T, D]. `members` are its weights by member name.
    `extend` appends keys and values to those of earlier tokens and returns all. In training, the number of
    tokens of each expert is added to `routed`."""
    hidden_BTD, normed_BTD = attended(members, shape, hidden_BTD, rotation, extend)
    if shape.experts.num_experts:
        mixed_ND = mixture(members, shape, normed_BTD.flatten(0, 1), routed)
        return hidden_BTD + mixed_ND.view_as(hidden_BTD)
    return hidden_BTD + written(members, feed_forward(members, shape, "mlp.", normed_BTD))


def attended(
    members: Mapping[str, Tensor],
    shape: ModelShape,
    hidden_BTD: Tensor,
    rotation: Rotation,
    extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the first half of a layer. Returns the hidden states after attention, and the same normed: the
    input of the feed-forward. `extend` appends keys and values to those of earlier tokens and returns all."""
    normed_BTD = _norm(hidden_BTD, members["input_layernorm"], shape)
    attended_BTD = _attention(members, shape, normed_BTD, rotation, extend)
    hidden_BTD = hidden_BTD + written(members, attended_BTD)  # Widened to D at shared directions.
    return hidden_BTD, _norm(hidden_BTD, members["post_attention_layernorm"], shape)


def logits(weights: Mapping[str, Tensor], shape: ModelShape, hidden_BTD: Tensor) -> Tensor:
    """Return logits, float32 [B, T, V], from the hidden states after all layers."""
    head_VD = weights[EMBEDDING if shape.tie_word_embeddings else HEAD]
    return linear(_norm(hidden_BTD, weights[FINAL_NORM], shape), head_VD).float()


def _attention(
    members: Mapping[str, Tensor],
    shape: ModelShape,
    normed_BTD: Tensor,
    rotation: Rotation,
    extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
) -> Tensor:
    """Return the output of causal self-attention, [B, T, D]. `extend` appends the keys and values to cached
    ones of earlier tokens; None without a cache."""

    def heads(projected: Tensor, norm: str | None = None) -> Tensor:
        """Split [B, T, H * W] into heads, [B, H, T, W]. QK-norm uses the gains named `norm`."""
        x_BTHW = projected.view(*projected.shape[:2], -1, shape.head_dim)
        if shape.qk_norm and norm:
            x_BTHW = _norm(x_BTHW, members[norm], shape)
        return x_BTHW.transpose(1, 2)

    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    query, key, value = lora_products(members, shape, normed_BTD, names)
    if shape.attention_bias:
        query, key, value = (
            product + members[name + BIAS].to(product.dtype)
            for name, product in zip(names, (query, key, value), strict=True)
        )
    query_BHTW = _rotate(heads(query, "self_attn.q_norm"), rotation).to(value.dtype)
    key_BKSW = _rotate(heads(key, "self_attn.k_norm"), rotation).to(value.dtype)
    value_BKSW = heads(value)
    if extend is not None:
        key_BKSW, value_BKSW = extend(key_BKSW, value_BKSW)
    attended_BHTW = functional.scaled_dot_product_attention(
        query_BHTW,
        key_BKSW,
        value_BKSW,
        is_causal=query_BHTW.shape[2] > 1,
        enable_gqa=shape.num_attention_heads != shape.num_key_value_heads,
    )
    (projected_BTD,) = lora_products(
        members, shape, attended_BHTW.transpose(1, 2).flatten(2), ["self_attn.o_proj"]
    )
    return projected_BTD


def _norm(x: Tensor, gain: Tensor, shape: ModelShape) -> Tensor:
    return functional.rms_norm(x.float(), gain.shape, gain, shape.rms_norm_eps)


def rotation_of(shape: ModelShape, start: int, length: int, device: torch.device) -> Rotation:
    """Return cos_TW and sin_TW of positions start .. start + length (arXiv:2104.09864, equation 34)."""
    exponent = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    position_T = torch.arange(start, start + length, device=device).float()
    frequencies = _stretched(1.0 / shape.rope_theta**exponent, shape.rope_scaling)
    angle_TW = torch.outer(position_T, frequencies).repeat(1, 2)
    return angle_TW.cos(), angle_TW.sin()


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the frequencies [W / 2], in radians per position, that `scaling` makes of those of plain rotary
    positions. Operations and their order are those of transformers, so that the angles have equal bits."""
    if scaling.rope_type == "default":
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return stretched
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / (2 * pi / frequencies)  # Within the original length.
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _rotate(x_BHTW: Tensor, rotation: Rotation) -> Tensor:
    cos_TW, sin_TW = rotation
    first, second = x_BHTW.chunk(2, dim=-1)
    return x_BHTW * cos_TW + torch.cat((-second, first), dim=-1) * sin_TW
