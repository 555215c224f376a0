"""Whether a manifest contradicts itself: what every published run has been looked through for."""

from __future__ import annotations

import re
from math import inf

from swarmnet.run.boundary import contradictions
from swarmnet.run.local_steps import MOMENTUM_PRESETS, PRESETS
from swarmnet.run.manifest import (
    BYTES,
    PROJECTIONS,
    STANDARD_LIBRARY,
    WIRE_VERSION,
    Data,
    Experts,
    Lora,
    Manifest,
    ManifestError,
    ModelShape,
    Sync,
)

HEXADECIMAL = frozenset("0123456789abcdef")
MAX_EXPERTS = 1024
"""Twice what the largest published mixtures have in a layer."""
MAX_GROUPS = 256
"""Of experts: a contribution says in a byte which one it is of."""
MAX_EXPERT_RATE = 10.0
"""Times the rate of all else: more is a slip of the pen."""
LARGEST_COMPARED = 1 << 25
"""Numbers of an expert's matrix whose products can be summed exactly (swarmnet/model/experts/merging.py)."""
MAX_RANK = 1024
"""What a step's exact sums have room for (swarmnet/optimizer/low_rank/exact.py)."""
MAX_SHARDS = 64
"""Of a sharded exchange: more are smaller than what surrounds them."""

"""A newcomer of an hour's rounds waits for a working week."""
MAX_PATTERNS, MAX_PATTERN_CHARACTERS, MAX_LAYERS = 16, 128, 1024
"""Of `sync.trainable`, and of a model that has it: a stranger's manifest is not to keep its reader busy."""
MAX_STAGES = 4096
"""Those of routed experts counted: peers look at each stage's records."""
MAX_BODY_BYTES = 32 << 20
"""Two of them on their way fill a link: it keeps 64 MiB until they are acknowledged, and refuses more. A
microbatch of 2,048 tokens of width 4096 takes 17 MB."""


def check(manifest: Manifest) -> None:
    """Raise ManifestError where fields contradict one another."""
    model, rounds, sync, paths = manifest.model, manifest.rounds, manifest.sync, manifest.paths
    problems = [
        (manifest.wire_version != WIRE_VERSION,
         f"wire_version is {manifest.wire_version}, this program speaks {WIRE_VERSION}"),
        (re.fullmatch(r"[A-Za-z0-9.+-]{0,64}", manifest.license) is None,
         f"license is {manifest.license[:80]!r}; expected an SPDX identifier such as apache-2.0"),
        (not manifest.stages or min(manifest.stages, default=0) < 1,
         "stages: every stage needs at least one layer"),
        (sum(manifest.stages) != model.num_hidden_layers,
         f"stages hold {sum(manifest.stages)} layers together, model.num_hidden_layers is "
         f"{model.num_hidden_layers}"),
        (min(model.vocab_size, model.hidden_size, model.num_attention_heads, model.num_key_value_heads,
             model.intermediate_size) < 1,
         "model: sizes must be at least 1"),
        (model.num_key_value_heads > 0 and model.num_attention_heads % model.num_key_value_heads != 0,
         f"model.num_attention_heads ({model.num_attention_heads}) must be a multiple of "
         f"num_key_value_heads ({model.num_key_value_heads})"),
        (model.head_dim % 2 != 0, "model.head_dim must be even (rotary embedding turns pairs)"),
        (manifest.data.tokenizer == BYTES and model.vocab_size < 256,
         "model.vocab_size must be at least 256 for byte-level text"),
        (manifest.data.seq_len > model.max_position_embeddings,
         "data.seq_len exceeds model.max_position_embeddings"),
        (min(manifest.data.seq_len, manifest.data.micro_batch_size) < 1,
         "data: seq_len and micro_batch_size must be at least 1"),
        (len(manifest.stages) > 1 and manifest.body_bytes > MAX_BODY_BYTES,
         f"data: a microbatch takes {manifest.body_bytes:,} bytes from stage to stage, at most "
         f"{MAX_BODY_BYTES:,} may be; fewer sequences in it, shorter ones, or a smaller activation_codec"),
        (manifest.gradient_rounding != "nearest" and manifest.codec_back in ("fp32", "bf16"),
         f"gradient_rounding: {manifest.codec_back} is not rounded by chance, only int8 and tiles are"),
        (not manifest.data.sources, "data.sources is empty"),
        (any(source.bytes < 0 for source in manifest.data.sources), "data.sources: bytes cannot be negative"),
        *_of_data(manifest.data),
        (rounds.global_batch_tokens < 1 or rounds.window < 1 or rounds.snapshot_interval < 1,
         "rounds: global_batch_tokens, window and snapshot_interval must be at least 1"),
        (not 0.0 <= paths.skip_ratio < 1.0, f"paths.skip_ratio is {paths.skip_ratio}; it must lie in [0, 1)"),
        (0.0 < paths.skip_ratio < 1.0 and manifest.path_rules().most_skipped == 0,
         f"paths.skip_ratio {paths.skip_ratio:.3g} of {len(manifest.stages)} stages leaves none out"),
        (manifest.path_rules().trains_no_middle,
         f"paths.skip_ratio {paths.skip_ratio:.3g} of {len(manifest.stages)} stages lets every microbatch "
         "leave out all between the first and the last, so nobody would train them"),
        (paths.full_path_warmup_rounds < 0,
         f"paths.full_path_warmup_rounds is {paths.full_path_warmup_rounds}; it cannot be negative"),
        (not 0.0 <= paths.full_path_fraction < 1.0,
         f"paths.full_path_fraction is {paths.full_path_fraction:g}; it must lie in [0, 1)"),
        ((paths.full_path_warmup_rounds > 0 or paths.full_path_fraction > 0)
         and not manifest.path_rules().most_skipped,
         "paths.full_path_warmup_rounds and paths.full_path_fraction: without paths.skip_ratio nothing "
         "is ever left out"),
        (not 0 <= paths.swaps <= len(manifest.stages),
         f"paths.swaps is {paths.swaps}; it must lie between 0 and the number of stages"),
        (paths.swaps > 0 and len(manifest.stages) < 4,
         "paths.swaps: two stages can only be swapped between the first and the last, so there must be 4"),
        *_of_experts(model, sync),
        *_of_start(manifest),
        *_of_sync(sync),
        (not 0.0 <= manifest.model.residual_init_scale <= 1.0,
         f"model.residual_init_scale is {manifest.model.residual_init_scale:g}; it must lie in [0, 1]"),
        *((True, problem) for problem in contradictions(
            model.boundary, model.hidden_size, model.vocab_size, manifest.stages,
            paths.skip_ratio > 0.0 or paths.swaps > 0,
        )),
    ]  # fmt: skip
    for wrong, message in problems:
        if wrong:
            raise ManifestError(message)


def _of_experts(model: ModelShape, sync: Sync) -> list[tuple[bool, str]]:
    """As `_of_sync`."""
    experts = model.experts
    return [
        (not experts.num_experts and experts != Experts(),
         "model.experts: its keys say nothing without a count"),
        (not 0 <= experts.num_experts <= MAX_EXPERTS,
         f"model.experts.num_experts is {experts.num_experts}; it must lie in 0 to {MAX_EXPERTS}"),
        (experts.num_experts > 0 and not 1 <= experts.top_k <= experts.num_experts,
         f"model.experts.top_k is {experts.top_k}; it must lie between 1 and the count, "
         f"{experts.num_experts}"),
        (not 0.0 <= experts.aux_loss_coef <= 1.0,
         f"model.experts.aux_loss_coef is {experts.aux_loss_coef:g}; it must lie in [0, 1]"),
        (not 1 <= experts.groups <= MAX_GROUPS or experts.num_experts % experts.groups != 0,
         f"model.experts.groups is {experts.groups}; it must lie in 1 to {MAX_GROUPS} and divide the count, "
         f"{experts.num_experts}"),
        (experts.groups > 1 and sync.local_steps is None,
         "model.experts.groups: goes with a sync.method whose peers step by themselves, as local-steps or "
         "diloco"),
        (not 0.0 < sync.expert_lr_scale <= MAX_EXPERT_RATE
         or (experts.groups == 1 and sync.expert_lr_scale != 1.0),
         f"sync.expert_lr_scale is {sync.expert_lr_scale:g}; it must lie above 0, up to "
         f"{MAX_EXPERT_RATE:g}, and "
         "says nothing where model.experts.groups is 1"),
        ((experts.groups > 1 or experts.merge_rounds > 0) and (bool(sync.trainable) or model.lora.rank > 0),
         "model.experts: groups and merge_rounds do not go with sync.trainable or model.lora"),
        (experts.merge_rounds < 0 or not 0.0 <= experts.merge_share <= 1.0 or experts.merge_until < 1,
         "model.experts: merge_rounds cannot be negative, merge_share must lie in [0, 1], merge_until be at "
         "least 1"),
        (experts.merge_rounds > 0 and not 1 <= experts.merge_nearest < experts.num_experts,
         f"model.experts.merge_nearest is {experts.merge_nearest}; it must lie between 1 and the count less "
         f"one, {experts.num_experts - 1}"),
        (experts.merge_rounds > 0 and model.hidden_size * model.intermediate_size > LARGEST_COMPARED,
         f"model.experts.merge_rounds: experts of {LARGEST_COMPARED:,} numbers at most can be compared "
         "exactly"),
        (experts.num_experts > 0 and not model.qk_norm,
         "model.experts: needs qk_norm: true, as in Qwen3-MoE, or it could be exported as nothing known"),
        (experts.num_experts > 0 and model.boundary.is_narrow,
         "model.experts: narrow boundaries (model.boundary) and experts in one model cannot be exported"),
    ]  # fmt: skip


def _of_start(manifest: Manifest) -> list[tuple[bool, str]]:
    """As `_of_sync`."""
    start, model, patterns = manifest.init_checkpoint, manifest.model, manifest.sync.trainable
    lora, targets = model.lora, model.lora.targets
    hashes = [one for one in (start.sha256, *start.digests) if one]
    return [
        (not start.path and (start.sha256, start.origin, start.digests) != ("", "", ()),
         "start: sha256 and origin say nothing without a path"),
        (any(len(one) != 64 or not set(one) <= HEXADECIMAL for one in hashes) or "" in start.digests,
         "start: sha256 is no SHA-256 (64 hexadecimal digits)"),
        (bool(start.digests) and len(start.digests) != len(manifest.stages),
         f"start.digests: {len(start.digests)} of them, the run has {len(manifest.stages)} stages"),
        (bool(start.path) and (model.experts.num_experts > 0 or model.boundary.is_narrow),
         "start: only a plain Llama or Qwen3 can be started from, without model.experts or model.boundary"),
        (lora.rank == 0 and lora != Lora(), "model.lora: alpha and targets say nothing without a rank"),
        (not 0 <= lora.rank <= MAX_RANK, f"model.lora.rank is {lora.rank}; it must lie in 0 to {MAX_RANK}"),
        (not 0 < lora.alpha <= MAX_RANK,
         f"model.lora.alpha is {lora.alpha:g}; it must be positive, at most {MAX_RANK}"),
        (not targets or len(set(targets)) < len(targets) or not set(targets) <= set(PROJECTIONS),
         f"model.lora.targets: each once, at least one of {', '.join(PROJECTIONS)}"),
        (lora.rank > 0 and not start.path,
         "model.lora: needs a start; without one the frozen matrices stay as the seed drew them"),
        (len(patterns) > MAX_PATTERNS
         or any(not 0 < len(one) <= MAX_PATTERN_CHARACTERS for one in patterns),
         f"sync.trainable: at most {MAX_PATTERNS} patterns, of 1 to {MAX_PATTERN_CHARACTERS} characters"),
        (bool(patterns) and model.num_hidden_layers > MAX_LAYERS,
         f"sync.trainable: for models of up to {MAX_LAYERS} layers, this has {model.num_hidden_layers}"),
    ]  # fmt: skip


def _of_data(data: Data) -> list[tuple[bool, str]]:
    """What `check` looks at there, as `_of_sync`."""
    weights, indexes = [one.weight for one in data.sources], [one.index for one in data.sources if one.index]
    pinned_library = any(one.index and one.path == STANDARD_LIBRARY for one in data.sources)
    return [
        (data.sampling == "random" and any(weights),
         "data.sampling is drawn, and only what is read in epochs has a weight in data.sources"),
        (not all(0 <= weight < inf for weight in weights), "data.sources: weight cannot be negative"),
        (any(weights) and not all(weights),
         "data.sources: weight is for all sources or for none: one of 0 beside others would never be read"),
        (any(len(one) != 64 or not set(one) <= HEXADECIMAL for one in indexes),
         "data.sources: index is no SHA-256 (64 hexadecimal digits); `swarmnet index FOLDER` prints it"),
        (pinned_library, f"data.sources: {STANDARD_LIBRARY} is another with each Python: it has no index"),
        (len({one.name for one in data.sources}) < len(data.sources),
         "data.sources: each needs a name of its own"),
    ]  # fmt: skip


def _of_sync(sync: Sync) -> list[tuple[bool, str]]:
    """What `check` looks at there: whether it is wrong, and how to say so."""
    own = sync.local_steps
    return [
        (
            not 0 < sync.topk_per_chunk <= 4096 or sync.topk_per_chunk & (sync.topk_per_chunk - 1) != 0,
            f"sync.topk_per_chunk is {sync.topk_per_chunk}; it must be a power of two up to 4096",
        ),
        (not 0 <= sync.momentum < 1, "sync.momentum must lie in [0, 1)"),
        (
            sync.inner_batch_tokens < 0 or sync.optimizer_warmup_steps < 0,
            "sync: inner_batch_tokens and optimizer_warmup_steps cannot be negative",
        ),
        (
            not 0 <= sync.fragments <= 64 or sync.fragments & (sync.fragments - 1) != 0,
            f"sync.fragments is {sync.fragments}; it must be a power of two up to 64, or 0",
        ),
        (
            own is None and (sync.delta_codec, sync.residual) != ("method", "method"),
            f"sync.delta_codec and rest are for peers that step by themselves: {', '.join(PRESETS)}",
        ),
        (
            not 0 < sync.sparse_topk <= 4096 or sync.sparse_topk & (sync.sparse_topk - 1) != 0,
            f"sync.sparse_topk is {sync.sparse_topk}; it must be a power of two up to 4096",
        ),
        (not 0 <= sync.error_feedback_decay <= 1, "sync.error_feedback_decay must lie in [0, 1]"),
        (
            not 0.001 <= (sync.outer_lr or 1) <= 2,
            f"sync.outer_lr is {sync.outer_lr:g}; it must lie in 0.001 to 2, or be 0",
        ),
        (not 0 <= sync.outer_momentum <= 0.99, "sync.outer_momentum must lie in [0, 0.99]"),
        (
            sync.method not in MOMENTUM_PRESETS and (sync.outer_lr, sync.outer_momentum) != (0.0, 0.9),
            f"sync.outer_lr and outer_momentum are for {' and '.join(MOMENTUM_PRESETS)}",
        ),
        (
            sync.topology == "sharded-reduce" and own is None,
            f"sync.topology: only what peers that step by themselves contribute can be sharded: "
            f"{', '.join(PRESETS)}",
        ),
        (
            sync.topology == "sharded-reduce" and own is not None and own.delta_codec == "topk-2bit",
            "sync.topology: the largest of different peers are at different places, so their mean takes more "
            "bytes than they do; leave sharded out, or set sync.delta_codec",
        ),
        (not 0 < sync.rank <= MAX_RANK, f"sync.rank is {sync.rank}; it must lie in 1 to {MAX_RANK}"),
        (
            sync.chunking == "tiled" and sync.transform == "hadamard",
            "sync.chunking: tiled may have sides of any length, which sync.transform hadamard cannot "
            "do; dct can",
        ),
        (
            not 0 < sync.shards <= MAX_SHARDS,
            f"sync.shards is {sync.shards}; it must lie in 1 to {MAX_SHARDS}",
        ),
        (sync.learning_rate <= 0, "sync.learning_rate must be positive"),
    ]
