"""Which parameters the decoder has, by their Hugging Face names, in any slice of its layers, and which of
them a run trains.

No torch: what only counts parameters (memory, traffic, reports) starts without it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod, sqrt

from swarmnet.run.manifest import Manifest, ManifestError, ModelShape, Span

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
BRANCH_ENDS = ("self_attn.o_proj.weight", ".down_proj.weight")
"""The last matrices of attention and feed-forward, which are linear: scaled, they scale what a layer adds."""


def anchors_before(layer: int) -> str:
    """Of the boundary after so many layers: the table that the stage before it holds (boundary.py)."""
    return f"model.boundaries.{layer}.before.weight"


def anchors_after(layer: int) -> str:
    """The table that the stage behind it holds."""
    return f"model.boundaries.{layer}.after.weight"


def is_anchors(name: str) -> bool:
    """Whether it is a table of anchors: a row for each token, looked up and not multiplied with."""
    return name.startswith("model.boundaries.")


def is_muons(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon steps a parameter where it is the optimizer: a matrix of a layer. Tables are looked up and
    not multiplied with, and a router's rows are one expert each and nothing as a whole."""
    return len(shape) == 2 and name not in (EMBEDDING, HEAD) and not is_anchors(name) and not is_router(name)


def is_router(name: str) -> bool:
    """Whether it is the matrix that gives a token its share of each expert."""
    return name.endswith(".mlp.gate.weight")


def active_parameters(shape: ModelShape, span: Span) -> int:
    """Numbers that one token goes through: of each layer's experts those that it takes."""
    sizes = {name: prod(size) for name, size in parameter_shapes(shape, span).items()}
    of_experts = sum(size for name, size in sizes.items() if is_experts(name))
    left_out = of_experts * (shape.experts.count - shape.experts.active) // max(1, shape.experts.count)
    return sum(sizes.values()) - left_out


def is_experts(name: str) -> bool:
    """Whether it belongs to one expert: a token goes through `experts.active` of `experts.count` of these."""
    return ".mlp.experts." in name


def factor_names(name: str) -> tuple[str, str]:
    """A and B of a matrix's LoRA factors, as PEFT calls them."""
    stem = name.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def is_factor(name: str) -> bool:
    """Whether it is one of the two."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def has_factors(shape: ModelShape, name: str) -> bool:
    """Whether a parameter is a matrix that has LoRA factors."""
    return shape.lora.rank > 0 and name.removesuffix(".weight").rpartition(".")[2] in shape.lora.targets


def whole(shape: ModelShape) -> Span:
    """The span of the unsplit model."""
    return Span(0, shape.layers, has_embedding=True, has_head=True)


def parameter_shapes(shape: ModelShape, span: Span) -> dict[str, tuple[int, ...]]:
    """Global parameter name -> shape, in model order, of what `span` holds."""
    queries, keys = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
    shapes: dict[str, tuple[int, ...]] = {}
    if span.has_embedding:
        is_shared = shape.boundary.form == "shared"
        shapes[EMBEDDING] = (shape.vocabulary, shape.crossing if is_shared else shape.width)
    anchors = (shape.boundary.anchor_rows or shape.vocabulary, shape.width)
    anchored = shape.boundary.after if shape.boundary.form == "anchored" else ()
    for layer in range(span.first, span.stop):
        if layer in anchored:
            if layer > span.first:
                shapes[anchors_before(layer)] = anchors
            shapes[anchors_after(layer)] = anchors
        written = shape.crossing if shape.boundary.is_shared_at(layer) else shape.width
        members: dict[str, tuple[int, ...]] = {
            "input_layernorm": (shape.width,),
            "self_attn.q_proj": (queries, shape.width),
            "self_attn.k_proj": (keys, shape.width),
            "self_attn.v_proj": (keys, shape.width),
            "self_attn.o_proj": (written, queries),
            "post_attention_layernorm": (shape.width,),
        }
        members |= _feed_forwards(shape, written)
        if shape.qk_norm:
            members["self_attn.q_norm"] = members["self_attn.k_norm"] = (shape.head_width,)
        for member, size in members.items():
            name = f"model.layers.{layer}.{member}.weight"
            shapes[name] = size
            if has_factors(shape, name):
                down, up = factor_names(name)
                shapes[down], shapes[up] = (shape.lora.rank, size[1]), (size[0], shape.lora.rank)
    if span.stop in anchored:
        shapes[anchors_before(span.stop)] = anchors
    if span.has_head:
        shapes[FINAL_NORM] = (shape.width,)
        shapes[HEAD] = (shape.vocabulary, shape.width)
    return shapes


def _feed_forwards(shape: ModelShape, written: int) -> dict[str, tuple[int, ...]]:
    """Of one layer, which adds so many numbers."""
    count = shape.experts.count
    members: dict[str, tuple[int, ...]] = {}
    if count:
        members["mlp.gate"] = (count, shape.width)
    for which in [f"mlp.experts.{expert}." for expert in range(count)] if count else ["mlp."]:
        members[f"{which}gate_proj"] = members[f"{which}up_proj"] = (shape.feed_forward, shape.width)
        members[f"{which}down_proj"] = (written, shape.feed_forward)
    return members


def branch_share(shape: ModelShape, name: str) -> float:
    """What a parameter begins with and is stepped by, times `initial_deviation` and the learning rate.

    2 x layers branches add to the hidden states, so the last matrix of each counts 1 / sqrt(2 x layers):
    GPT-2's rule for first weights. Here for steps as well: a step by signs has its size whatever the weight
    is good for (docs/decisions/0017-quiet-branches.md).
    """
    if not name.endswith(BRANCH_ENDS):
        return 1.0
    return shape.branch_share or 1.0 / sqrt(2 * shape.layers)  # Rounded alike everywhere.


def drawn_as(shape: ModelShape, name: str) -> str:
    """Which name draws a parameter's first values. All anchors begin alike, so that at first a boundary
    passes on what layers have added; with a row for each token they begin as the embedding, whoever holds it.
    """
    if not is_anchors(name):
        return name
    return "model.boundaries" if shape.boundary.anchor_rows else EMBEDDING


def first_share(shape: ModelShape, name: str) -> float:
    """The deviation of a parameter's first values, in `initial_deviation`s."""
    if is_anchors(name):  # The sum of two rows is to be as large as a row of the embedding.
        return sqrt(0.5) if shape.boundary.anchor_rows else 1.0
    return branch_share(shape, name)


def first_deviation(shape: ModelShape, name: str, size: tuple[int, ...]) -> float:
    """The standard deviation of a matrix's first values. Of LoRA's factors A has that of the uniform ones
    which PEFT draws, 1 / sqrt(3 in), and B begins at zero."""
    if is_factor(name):
        return 1.0 / sqrt(3 * size[1]) if ".lora_A." in name else 0.0
    return shape.initial_deviation * first_share(shape, name)


def has_frozen(manifest: Manifest) -> bool:
    """Whether the run says what is trained: else all is."""
    return bool(manifest.sync.trainable) or manifest.model.lora.rank > 0


def is_trained(manifest: Manifest, name: str) -> bool:
    """Whether the parameter of this name is."""
    patterns, has_factors = manifest.sync.trainable, manifest.model.lora.rank > 0
    if not has_frozen(manifest):
        return True
    return (has_factors and is_factor(name)) or any(fnmatchcase(name, pattern) for pattern in patterns)


def check_trained(manifest: Manifest) -> None:
    """Raise ManifestError where `sync.trainable` names what is not there, or leaves a stage nothing to train.
    After `manifest_check.check`."""
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
