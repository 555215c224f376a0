"""List the decoder's parameters by Hugging Face names for any slice of its layers, and which of them are
trained.

At a narrow boundary between two stages (boundary.py) fewer numbers per token cross. *Anchors* are learned
vectors per token of such a boundary. The module does not import torch, so that code that only counts
parameters starts fast.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod, sqrt

from swarmnet.run.manifest import Manifest, ManifestError, Span
from swarmnet.run.schema import ModelShape

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
BIAS = ".bias"
"""Suffix of vectors that are added to a product; all other vectors are gains of norms."""
BRANCH_ENDS = ("self_attn.o_proj.weight", ".down_proj.weight")
"""The last matrices of attention and feed-forward. They are linear, so their scale is that of the branch."""


def anchors_before(layer: int) -> str:
    """Return the name of the anchor table of the stage before the boundary after `layer` (`boundary.py`)."""
    return f"model.boundaries.{layer}.before.weight"


def anchors_after(layer: int) -> str:
    """Return the name of the anchor table of the stage after the boundary."""
    return f"model.boundaries.{layer}.after.weight"


def is_anchors(name: str) -> bool:
    """Return whether it is a table of anchors, with a row for each token that is looked up."""
    return name.startswith("model.boundaries.")


def trains_with_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether Muon, if it is the optimizer, steps this parameter: a matrix of a layer. Tables are
    looked up and not multiplied with. The rows of a router are unrelated vectors of experts."""
    return len(shape) == 2 and name not in (EMBEDDING, HEAD) and not is_anchors(name) and not is_router(name)


def is_router(name: str) -> bool:
    """Return whether it is a router matrix, which gives a token its share of each expert."""
    return name.endswith(".mlp.gate.weight")


def active_parameters(shape: ModelShape, span: Span) -> int:
    """Return the number of parameters that one token uses: all, except experts that it does not choose."""
    sizes = {name: prod(size) for name, size in parameter_shapes(shape, span).items()}
    in_experts = sum(size for name, size in sizes.items() if is_experts(name))
    inactive_experts = shape.experts.num_experts - shape.experts.top_k
    inactive = in_experts * inactive_experts // max(1, shape.experts.num_experts)
    return sum(sizes.values()) - inactive


def is_experts(name: str) -> bool:
    """Return whether it belongs to one expert; a token uses only some experts of each layer."""
    return ".mlp.experts." in name


def factor_names(name: str) -> tuple[str, str]:
    """Return the names of A and B of a matrix's LoRA factors, as in PEFT."""
    stem = name.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def is_factor(name: str) -> bool:
    """Return whether it is a LoRA factor."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def has_factors(shape: ModelShape, name: str) -> bool:
    """Return whether a parameter is a matrix that has LoRA factors."""
    return shape.lora.rank > 0 and name.removesuffix(".weight").rpartition(".")[2] in shape.lora.targets


def whole(shape: ModelShape) -> Span:
    """Return the span of the unsplit model."""
    return Span(0, shape.num_hidden_layers, has_embedding=True, has_head=True)


def parameter_shapes(shape: ModelShape, span: Span) -> dict[str, tuple[int, ...]]:
    """Return the parameters of `span` as global name -> shape, in model order. Narrow boundaries add tables
    of anchors, or make the layers before them write only `shape.crossing` numbers per token. LoRA adds two
    factors behind a matrix."""
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if span.has_embedding:
        is_shared = shape.boundary.kind == "shared-subspace"
        embedding_width = shape.crossing if is_shared else shape.hidden_size
        shapes[EMBEDDING] = (shape.vocab_size, embedding_width)
    anchor_table = (shape.boundary.anchor_rows or shape.vocab_size, shape.hidden_size)
    anchored = shape.boundary.after if shape.boundary.kind == "token-anchored" else ()
    for layer in range(span.first, span.stop):
        if layer in anchored:  # A boundary is in front of this layer.
            if layer > span.first:  # It is inside the span, which then has both its tables.
                shapes[anchors_before(layer)] = anchor_table
            shapes[anchors_after(layer)] = anchor_table
        output_width = shape.crossing if shape.boundary.is_shared_at(layer) else shape.hidden_size
        members: dict[str, tuple[int, ...]] = {
            "input_layernorm": (shape.hidden_size,),
            "self_attn.q_proj": (queries, shape.hidden_size),
            "self_attn.k_proj": (keys, shape.hidden_size),
            "self_attn.v_proj": (keys, shape.hidden_size),
            "self_attn.o_proj": (output_width, queries),
            "post_attention_layernorm": (shape.hidden_size,),
        }
        members |= _feed_forward_shapes(shape, output_width)
        if shape.qk_norm:
            members["self_attn.q_norm"] = members["self_attn.k_norm"] = (shape.head_dim,)
        for member, size in members.items():
            name = f"model.layers.{layer}.{member}.weight"
            shapes[name] = size
            if has_factors(shape, name):
                down, up = factor_names(name)
                shapes[down], shapes[up] = (shape.lora.rank, size[1]), (size[0], shape.lora.rank)
        if shape.attention_bias:
            for projection, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                shapes[f"model.layers.{layer}.self_attn.{projection}{BIAS}"] = (outputs,)
    if span.stop in anchored:
        shapes[anchors_before(span.stop)] = anchor_table
    if span.has_head:
        shapes[FINAL_NORM] = (shape.hidden_size,)
        if not shape.tie_word_embeddings:
            shapes[HEAD] = (shape.vocab_size, shape.hidden_size)
    return shapes if span.end is None else shapes | parameter_shapes(shape, span.end)


def _feed_forward_shapes(shape: ModelShape, output_width: int) -> dict[str, tuple[int, ...]]:
    """Return the feed-forward parameters of one layer as member name -> shape. With experts, these are a
    router and a set of matrices for each. A layer adds `output_width` numbers per token."""
    experts = shape.experts.num_experts
    members: dict[str, tuple[int, ...]] = {}
    prefixes = ["mlp."]
    if experts:
        members["mlp.gate"] = (experts, shape.hidden_size)
        prefixes = [f"mlp.experts.{expert}." for expert in range(experts)]
    inwards = (shape.intermediate_size, shape.hidden_size)
    for prefix in prefixes:
        members[f"{prefix}gate_proj"] = members[f"{prefix}up_proj"] = inwards
        members[f"{prefix}down_proj"] = (output_width, shape.intermediate_size)
    return members


def residual_init_scale(shape: ModelShape, name: str) -> float:
    """Return the scale of a parameter's first values and optimizer steps, relative to `initializer_range` and
    learning rate. A model adds 2 x layers branches to the hidden states. The last matrix of each is scaled by
    1 / sqrt(2 x layers), as in GPT-2, or as the model sets it; all others by 1. Steps are scaled too: a step
    by the gradient's sign has the same size for every weight (docs/decisions/0017-quiet-branches.md)."""
    if not name.endswith(BRANCH_ENDS):
        return 1.0
    return shape.residual_init_scale or 1.0 / sqrt(2 * shape.num_hidden_layers)  # Rounded alike everywhere.


def init_draw_name(shape: ModelShape, name: str) -> str:
    """Return the name that seeds the draws of a parameter's first values: its own, except for tables of
    anchors. All such tables start equal, so that at first a boundary passes on what layers have added. With a
    row for each token they start equal to the embedding."""
    if not is_anchors(name):
        return name
    return "model.boundaries" if shape.boundary.anchor_rows else EMBEDDING


def init_std_factor(shape: ModelShape, name: str) -> float:
    """Return the standard deviation of a parameter's first values, in units of `initializer_range`."""
    if is_anchors(name):  # The sum of two rows is as large as a row of the embedding.
        return sqrt(0.5) if shape.boundary.anchor_rows else 1.0
    return residual_init_scale(shape, name)


def initial_std(shape: ModelShape, name: str, size: tuple[int, ...]) -> float:
    """Return the standard deviation of the first values of a matrix of shape `size` [out, in]. LoRA's A has
    that of PEFT's uniform values, 1 / sqrt(3 in), and LoRA's B is zero at first."""
    if is_factor(name):
        return 1.0 / sqrt(3 * size[1]) if ".lora_A." in name else 0.0
    return shape.initializer_range * init_std_factor(shape, name)


def has_frozen(manifest: Manifest) -> bool:
    """Return whether the run limits what is trained. Otherwise all parameters are trained."""
    return bool(manifest.sync.trainable) or manifest.model.lora.rank > 0


def is_trained(manifest: Manifest, name: str) -> bool:
    """Return whether the parameter of this name is trained. If the run limits what is trained, these are LoRA
    factors and names that match a pattern of `sync.trainable`."""
    if not has_frozen(manifest):
        return True
    if manifest.model.lora.rank > 0 and is_factor(name):
        return True
    return any(fnmatchcase(name, pattern) for pattern in manifest.sync.trainable)


def check_trained(manifest: Manifest) -> None:
    """Check the name patterns of `sync.trainable`, after `manifest_check.check`. Raises ManifestError if one
    matches no parameter or if a stage has nothing to train."""
    patterns = manifest.sync.trainable
    if not patterns:
        return
    names = list(parameter_shapes(manifest.model, whole(manifest.model)))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ManifestError(
                f"sync.trainable: no parameter is called {pattern!r}; they have names as "
                f"{names[min(1, len(names) - 1)]}"
            )
    for stage in range(len(manifest.stages)):
        shapes = parameter_shapes(manifest.model, manifest.span(stage))
        if not any(is_trained(manifest, name) for name in shapes):
            raise ManifestError(f"sync.trainable: stage {stage} has nothing to train; name a parameter of it")
