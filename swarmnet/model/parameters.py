"""Which parameters the decoder has, by their Hugging Face names, in any slice of its layers.

No torch: what only counts parameters (memory, traffic, reports) starts without it.
"""

from __future__ import annotations

from math import sqrt

from swarmnet.run.manifest import ModelShape, Span

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
BRANCH_ENDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""The last matrices of attention and feed-forward, which are linear: scaled, they scale what a layer adds."""


def is_muons(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon steps a parameter where it is the optimizer: a matrix of a layer."""
    return len(shape) == 2 and name not in (EMBEDDING, HEAD)


def whole(shape: ModelShape) -> Span:
    """The span of the unsplit model."""
    return Span(0, shape.layers, has_embedding=True, has_head=True)


def parameter_shapes(shape: ModelShape, span: Span) -> dict[str, tuple[int, ...]]:
    """Global parameter name -> shape, in model order, of what `span` holds."""
    queries, keys = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
    shapes: dict[str, tuple[int, ...]] = {}
    if span.has_embedding:
        shapes[EMBEDDING] = (shape.vocabulary, shape.width)
    for layer in range(span.first, span.stop):
        members: dict[str, tuple[int, ...]] = {
            "input_layernorm": (shape.width,),
            "self_attn.q_proj": (queries, shape.width),
            "self_attn.k_proj": (keys, shape.width),
            "self_attn.v_proj": (keys, shape.width),
            "self_attn.o_proj": (shape.width, queries),
            "post_attention_layernorm": (shape.width,),
            "mlp.gate_proj": (shape.feed_forward, shape.width),
            "mlp.up_proj": (shape.feed_forward, shape.width),
            "mlp.down_proj": (shape.width, shape.feed_forward),
        }
        if shape.qk_norm:
            members["self_attn.q_norm"] = members["self_attn.k_norm"] = (shape.head_width,)
        shapes |= {f"model.layers.{layer}.{member}.weight": size for member, size in members.items()}
    if span.has_head:
        shapes[FINAL_NORM] = (shape.width,)
        shapes[HEAD] = (shape.vocabulary, shape.width)
    return shapes


def branch_share(shape: ModelShape, name: str) -> float:
    """What a parameter begins with and is stepped by, times `initial_deviation` and the learning rate.

    2 x layers branches add to the hidden states, so the last matrix of each counts 1 / sqrt(2 x layers):
    GPT-2's rule for first weights. Here for steps as well: a step by signs has its size whatever the weight
    is good for (docs/decisions/0017-quiet-branches.md).
    """
    if not name.endswith(BRANCH_ENDS):
        return 1.0
    return shape.branch_share or 1.0 / sqrt(2 * shape.layers)  # Rounded alike everywhere.
