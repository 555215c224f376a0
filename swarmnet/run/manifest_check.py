"""Check that the keys of a manifest do not contradict each other.

The manifest is the file with all settings of a run. Each row of the tables has a condition that must be false
and the message of the error. A message starts with the key, so that `peers/config/run_file.py` finds its line
in the run file. It ends with what to write.
"""

from __future__ import annotations

import re
from math import inf

from swarmnet.run.boundary_settings import contradictions
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.method_config import Problem
from swarmnet.run.private_rules import private_rows
from swarmnet.run.schema import (
    BYTES,
    MAX_MODERATORS,
    PROJECTIONS,
    STANDARD_LIBRARY,
    WIRE_VERSION,
    Data,
    Experts,
    Lora,
    ModelShape,
    Moderators,
    Paths,
    RopeScaling,
    Rounds,
    Sync,
)
from swarmnet.run.sync_methods import MAX_RANK, METHOD_CONFIGS, OUTER_METHODS, PRESETS

HEXADECIMAL = frozenset("0123456789abcdef")
PRIVATE_KINDS = ("private", "licensed", "users")
"""Kinds of text that peers never send to each other."""
MAX_EXPERTS = 1024
"""Twice the number per layer in the largest published mixtures."""
MAX_GROUPS = 256
"""Maximum number of expert groups: a contribution names its group in one byte."""
MAX_EXPERT_RATE = 10.0
"""Maximum of `sync.expert_lr_scale`: a larger value is a typing error."""
LARGEST_COMPARED = 1 << 25
"""Values of an expert's matrix whose products can be summed exactly (`swarmnet/model/experts/merging.py`)."""
MAX_PATTERNS, MAX_PATTERN_CHARACTERS, MAX_LAYERS = 16, 128, 1024
"""Limits of `sync.trainable` and of a model that uses it, so that matching an untrusted manifest is cheap."""
MAX_STRETCH = 1e6
"""Maximum of the factors of `model.rope_scaling`: larger ones are typing errors."""
MAX_STAGES = 4096
"""Maximum number of stages: peers read the records of every stage."""
MAX_BODY_BYTES = 32 << 20
"""Maximum bytes of a microbatch between stages. Two of them fill a link, which keeps up to 64 MiB until they
are acknowledged and refuses more. A microbatch of 2,048 tokens of width 4096 takes 17 MB."""


def is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= HEXADECIMAL


def check(manifest: Manifest) -> None:
    """Raise ManifestError, with the first problem, if keys contradict each other."""
    model, paths = manifest.model, manifest.paths
    between_stages = contradictions(
        model.boundary,
        width=model.hidden_size,
        vocabulary=model.vocab_size,
        stages=manifest.stages,
        skips_stages=paths.skip_ratio > 0.0,
    )
    problems = [
        *_model_rows(manifest, model),
        *_model_kind_rows(manifest, model),
        *_microbatch_rows(manifest, model),
        *_data_rows(manifest.data),
        *_rounds_rows(manifest.rounds),
        *_paths_rows(manifest, paths),
        *_experts_rows(model, manifest.sync),
        *_expert_merging_rows(model),
        *_initial_weights_rows(manifest),
        *_sync_rows(manifest.sync),
        *private_rows(manifest),
        *((True, problem) for problem in between_stages),
    ]
    for is_wrong, message in problems:
        if is_wrong:
            raise ManifestError(message)


def _can_moderate(moderators: Moderators) -> bool:
    """Return whether there are no moderators, or as many different ones as must sign."""
    keys = moderators.keys
    is_possible = 1 <= moderators.needed <= len(set(keys)) == len(keys) <= MAX_MODERATORS
    return is_possible or moderators == Moderators()


def _model_rows(manifest: Manifest, model: ModelShape) -> list[Problem]:
    """Return the rules about the version, the licence, and the model's sizes."""
    return [
        (
            manifest.wire_version != WIRE_VERSION,
            f"wire_version is {manifest.wire_version}; this program supports only {WIRE_VERSION}",
        ),
        (
            re.fullmatch(r"[A-Za-z0-9.+-]{0,64}", manifest.license) is None,
            f"license is {manifest.license[:80]!r}; write an SPDX identifier such as apache-2.0",
        ),
        (
            not _can_moderate(manifest.moderators),
            f"moderators: {len(manifest.moderators.keys)} keys, of which {manifest.moderators.needed} must "
            f"sign; name 1 to {MAX_MODERATORS} different keys, and need at least 1 and at most all of them",
        ),
        (
            not manifest.stages or min(manifest.stages, default=0) < 1,
            f"stages is {list(manifest.stages)}; every stage needs at least one layer",
        ),
        (
            sum(manifest.stages) != model.num_hidden_layers,
            f"stages hold {sum(manifest.stages)} layers together, model.num_hidden_layers is "
            f"{model.num_hidden_layers}; make them equal",
        ),
        (
            min(
                model.vocab_size,
                model.hidden_size,
                model.num_attention_heads,
                model.num_key_value_heads,
                model.intermediate_size,
            )
            < 1,
            "model: sizes must be at least 1",
        ),
        (
            model.num_key_value_heads > 0 and model.num_attention_heads % model.num_key_value_heads != 0,
            f"model.num_attention_heads ({model.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({model.num_key_value_heads})",
        ),
        (
            model.head_dim % 2 != 0,
            f"model.head_dim is {model.head_dim}; it must be even, because rotary embedding turns pairs",
        ),
        (
            not 0.0 <= manifest.model.residual_init_scale <= 1.0,
            f"model.residual_init_scale is {manifest.model.residual_init_scale:g}; it must lie in [0, 1]",
        ),
    ]


def _model_kind_rows(manifest: Manifest, model: ModelShape) -> list[Problem]:
    """Return the rules about biases, a tied head and stretched positions."""
    scaling = model.rope_scaling
    original, low, high = RopeScaling(), scaling.low_freq_factor, scaling.high_freq_factor
    of_llama3 = (low, high, scaling.original_max_position_embeddings)
    unused = (original.low_freq_factor, original.high_freq_factor, original.original_max_position_embeddings)
    return [
        (
            model.attention_bias and (model.qk_norm or model.boundary.kind == "token-anchored"),
            "model.attention_bias: no export is possible with qk_norm, or with boundary.kind: "
            "token-anchored; set attention_bias: false, or leave those out",
        ),
        (
            model.tie_word_embeddings and len(manifest.stages) > 1 and not manifest.is_u_shaped,
            f"model.tie_word_embeddings: true needs one stage, and there are {len(manifest.stages)}: the "
            "embedding lies in the first and the head in the last. Set it to false (a tied initial model is "
            f"untied by copying), or set stages: [{model.num_hidden_layers}]",
        ),
        (
            model.tie_word_embeddings and model.boundary.is_narrow,
            "model.tie_word_embeddings: true does not work with model.boundary; set it to false",
        ),
        (
            not 1.0 <= scaling.factor <= MAX_STRETCH,
            f"model.rope_scaling.factor is {scaling.factor:g}; it must lie in [1, {MAX_STRETCH:g}]",
        ),
        (
            scaling.rope_type == "default" and scaling.factor != original.factor,
            "model.rope_scaling: factor has no effect without rope_type; set rope_type: linear or llama3",
        ),
        (
            scaling.rope_type != "llama3" and of_llama3 != unused,
            "model.rope_scaling: low_freq_factor, high_freq_factor and original_max_position_embeddings have "
            "no effect without rope_type: llama3; leave them out",
        ),
        (
            not 0.0 < low < high <= MAX_STRETCH or scaling.original_max_position_embeddings < 1,
            f"model.rope_scaling: low_freq_factor is {low:g}, high_freq_factor {high:g}; the first must be "
            "above 0 and below the second, and original_max_position_embeddings at least 1",
        ),
    ]


def _microbatch_rows(manifest: Manifest, model: ModelShape) -> list[Problem]:
    """Return the rules about tokens and how they go from stage to stage."""
    return [
        (
            manifest.data.tokenizer == BYTES and model.vocab_size < 256,
            f"model.vocab_size is {model.vocab_size}; with data.tokenizer: bytes it must be at least 256",
        ),
        (
            manifest.data.format == "messages" and model.boundary.is_narrow,
            f"model.boundary.kind is {model.boundary.kind}, with which labels do not travel, as data.format: "
            "messages needs; set kind: full",
        ),
        (
            manifest.data.seq_len > model.max_position_embeddings,
            f"data.seq_len is {manifest.data.seq_len}; it must be at most model.max_position_embeddings, "
            f"{model.max_position_embeddings}",
        ),
        (
            min(manifest.data.seq_len, manifest.data.micro_batch_size) < 1,
            "data: seq_len and micro_batch_size must be at least 1",
        ),
        (
            len(manifest.stages) > 1 and manifest.body_bytes > MAX_BODY_BYTES,
            f"data: a microbatch takes {manifest.body_bytes:,} bytes from stage to stage, at most "
            f"{MAX_BODY_BYTES:,} are allowed; reduce micro_batch_size or seq_len, or set a smaller "
            "activation_codec",
        ),
        (
            manifest.gradient_rounding != "nearest" and manifest.effective_gradient_codec in ("fp32", "bf16"),
            f"gradient_rounding: {manifest.effective_gradient_codec} supports only nearest; stochastic needs "
            "gradient_codec: int8, int4-tiles or int6-tiles",
        ),
        (
            not 0.0 <= manifest.compared_fraction <= 0.5,
            f"compared_fraction is {manifest.compared_fraction:g}; it must lie in [0, 0.5]",
        ),
    ]


def _rounds_rows(rounds: Rounds) -> list[Problem]:
    """Return the rules about `rounds`."""
    return [
        (
            rounds.global_batch_tokens < 1 or rounds.window < 1 or rounds.snapshot_interval < 1,
            "rounds: global_batch_tokens, window and snapshot_interval must be at least 1",
        ),
    ]


def _paths_rows(manifest: Manifest, paths: Paths) -> list[Problem]:
    """Return the rules about `paths`."""
    return [
        (not 0.0 <= paths.skip_ratio < 1.0, f"paths.skip_ratio is {paths.skip_ratio}; it must lie in [0, 1)"),
        (
            0.0 < paths.skip_ratio < 1.0 and manifest.path_rules().most_skipped == 0,
            f"paths.skip_ratio {paths.skip_ratio:.3g} of {len(manifest.stages)} stages skips none; write 0 "
            "or a larger ratio",
        ),
        (
            manifest.path_rules().trains_no_middle,
            f"paths.skip_ratio {paths.skip_ratio:.3g} of {len(manifest.stages)} stages lets every microbatch "
            "skip all middle stages, so no peer would train them; write a smaller ratio",
        ),
        (
            paths.full_path_warmup_rounds < 0,
            f"paths.full_path_warmup_rounds is {paths.full_path_warmup_rounds}; it cannot be negative",
        ),
        (
            not 0.0 <= paths.full_path_fraction < 1.0,
            f"paths.full_path_fraction is {paths.full_path_fraction:g}; it must lie in [0, 1)",
        ),
        (
            (paths.full_path_warmup_rounds > 0 or paths.full_path_fraction > 0)
            and not manifest.path_rules().most_skipped,
            "paths.full_path_warmup_rounds and paths.full_path_fraction have no effect without "
            "paths.skip_ratio; set it, or leave them out",
        ),
    ]


def _experts_rows(model: ModelShape, sync: Sync) -> list[Problem]:
    """Return the rules about `model.experts`, the mixture of experts."""
    experts = model.experts
    return [
        (
            not experts.num_experts and experts != Experts(),
            "model.experts: its keys have no effect without num_experts; set model.experts.num_experts",
        ),
        (
            not 0 <= experts.num_experts <= MAX_EXPERTS,
            f"model.experts.num_experts is {experts.num_experts}; it must lie in 0 to {MAX_EXPERTS}",
        ),
        (
            experts.num_experts > 0 and not 1 <= experts.top_k <= experts.num_experts,
            f"model.experts.top_k is {experts.top_k}; it must lie between 1 and num_experts, "
            f"{experts.num_experts}",
        ),
        (
            not 0.0 <= experts.aux_loss_coef <= 1.0,
            f"model.experts.aux_loss_coef is {experts.aux_loss_coef:g}; it must lie in [0, 1]",
        ),
        (
            not 1 <= experts.groups <= MAX_GROUPS or experts.num_experts % experts.groups != 0,
            f"model.experts.groups is {experts.groups}; it must lie in 1 to {MAX_GROUPS} and divide "
            f"num_experts, {experts.num_experts}",
        ),
        (
            experts.groups > 1 and sync.local_steps is None,
            f"model.experts.groups is {experts.groups}; more than 1 needs a local-step method: set "
            f"sync.method to one of {', '.join(PRESETS)}",
        ),
        (
            not 0.0 < sync.expert_lr_scale <= MAX_EXPERT_RATE
            or (experts.groups == 1 and sync.expert_lr_scale != 1.0),
            f"sync.expert_lr_scale is {sync.expert_lr_scale:g}; it must lie above 0, up to "
            f"{MAX_EXPERT_RATE:g}, and has no effect where model.experts.groups is 1",
        ),
        (
            (experts.groups > 1 or experts.merge_rounds > 0)
            and (bool(sync.trainable) or model.lora.rank > 0),
            "model.experts: groups and merge_rounds cannot be combined with sync.trainable or model.lora; "
            "leave one of them out",
        ),
        (
            experts.groups > 1 and sync.weights == "tokens",
            "sync.weights: the peers of an expert group count alike; write equal, or set "
            "model.experts.groups: 1",
        ),
    ]


def _expert_merging_rows(model: ModelShape) -> list[Problem]:
    """Return the rules about merging experts and about models that have experts."""
    experts = model.experts
    return [
        (
            experts.merge_rounds < 0 or not 0.0 <= experts.merge_share <= 1.0 or experts.merge_until < 1,
            "model.experts: merge_rounds cannot be negative, merge_share must lie in [0, 1], merge_until be "
            "at least 1",
        ),
        (
            experts.merge_rounds > 0 and not 1 <= experts.merge_nearest < experts.num_experts,
            f"model.experts.merge_nearest is {experts.merge_nearest}; it must lie between 1 and "
            f"num_experts - 1, {experts.num_experts - 1}",
        ),
        (
            experts.merge_rounds > 0 and model.hidden_size * model.intermediate_size > LARGEST_COMPARED,
            f"model.experts.merge_rounds: only experts of up to {LARGEST_COMPARED:,} values per matrix can "
            "be compared exactly; set it to 0, or reduce model.intermediate_size",
        ),
        (
            experts.num_experts > 0 and not model.qk_norm,
            "model.experts: needs qk_norm: true, as in Qwen3-MoE; without it no export is possible",
        ),
        (
            experts.num_experts > 0 and model.boundary.is_narrow,
            "model.experts: cannot be combined with narrow boundaries, because no export is possible; set "
            "model.boundary.kind: full",
        ),
    ]


def _initial_weights_rows(manifest: Manifest) -> list[Problem]:
    """Return the rules about `init_checkpoint`, `model.lora` and `sync.trainable`."""
    init_checkpoint, model, lora = manifest.init_checkpoint, manifest.model, manifest.model.lora
    targets, patterns = lora.targets, manifest.sync.trainable
    keys_besides_path = init_checkpoint.sha256, init_checkpoint.origin, init_checkpoint.digests
    hashes = [digest for digest in (init_checkpoint.sha256, *init_checkpoint.digests) if digest]
    return [
        (
            not init_checkpoint.path and keys_besides_path != ("", "", ()),
            "init_checkpoint: sha256 and origin have no effect without a path; set init_checkpoint.path",
        ),
        (
            not all(map(is_sha256, hashes)) or "" in init_checkpoint.digests,
            "init_checkpoint: sha256 is no SHA-256 (64 hexadecimal digits); leave it out, and publishing "
            "fills it in",
        ),
        (
            bool(init_checkpoint.digests) and len(init_checkpoint.digests) != len(manifest.stages),
            f"init_checkpoint.digests has {len(init_checkpoint.digests)} entries; the run has "
            f"{len(manifest.stages)} stages",
        ),
        (
            bool(init_checkpoint.path) and (model.experts.num_experts > 0 or model.boundary.is_narrow),
            "init_checkpoint: only a plain Llama or Qwen3 can be loaded; leave out model.experts and "
            "model.boundary",
        ),
        (
            lora.rank == 0 and lora != Lora(),
            "model.lora: alpha and targets have no effect without a rank; set model.lora.rank",
        ),
        (not 0 <= lora.rank <= MAX_RANK, f"model.lora.rank is {lora.rank}; it must lie in 0 to {MAX_RANK}"),
        (
            not 0 < lora.alpha <= MAX_RANK,
            f"model.lora.alpha is {lora.alpha:g}; it must lie above 0, up to {MAX_RANK}",
        ),
        (
            not targets or len(set(targets)) < len(targets) or not set(targets) <= set(PROJECTIONS),
            f"model.lora.targets is {list(targets)[:9]}; name at least one of "
            f"{', '.join(PROJECTIONS)}, each once",
        ),
        (
            lora.rank > 0 and not init_checkpoint.path,
            "model.lora: needs init_checkpoint.path; without it the frozen matrices would stay random",
        ),
        (
            len(patterns) > MAX_PATTERNS
            or any(not 0 < len(pattern) <= MAX_PATTERN_CHARACTERS for pattern in patterns),
            f"sync.trainable: at most {MAX_PATTERNS} patterns of 1 to {MAX_PATTERN_CHARACTERS} characters "
            "are allowed",
        ),
        (
            bool(patterns) and model.num_hidden_layers > MAX_LAYERS,
            f"sync.trainable: the model has {model.num_hidden_layers} layers; patterns work with up to "
            f"{MAX_LAYERS}",
        ),
    ]


def _data_rows(data: Data) -> list[Problem]:
    """Return the rules about `data`."""
    weights = [source.weight for source in data.sources]
    indexes = [source.index for source in data.sources if source.index]
    has_library_index = any(source.index and source.path == STANDARD_LIBRARY for source in data.sources)
    return [
        (not data.sources, "data.sources is empty; name at least one"),
        (
            any(min(source.bytes, source.files, source.file_bytes) < 0 for source in data.sources),
            "data.sources: bytes, files and file_bytes cannot be negative",
        ),
        (
            any(
                source.shared == "peers"
                and (source.path == STANDARD_LIBRARY or source.licence in ("", "unknown"))
                for source in data.sources
            ),
            "data.sources: shared: peers gives the text to anyone; state its licence (every peer has "
            f"{STANDARD_LIBRARY} already)",
        ),
        (
            any(source.shared == "peers" and source.kind in PRIVATE_KINDS for source in data.sources),
            f"data.sources: shared: peers gives the text to anyone; leave it out with kind "
            f"{', '.join(PRIVATE_KINDS)}",
        ),
        (
            any(not source.column for source in data.sources),
            "data.sources: column is empty; leave it out, or name the field that holds the text",
        ),
        *(
            (bool(digest) and not is_sha256(digest), f"data.{key} is no SHA-256; publishing fills it in")
            for key, digest in (
                ("tokenizer_sha256", data.tokenizer_sha256),
                ("chat_template_sha256", data.chat_template_sha256),
            )
        ),
        (
            data.format == "messages" and data.tokenizer == BYTES,
            "data.format: messages needs the model's own tokenizer.json; name it as data.tokenizer",
        ),
        (
            data.sampling == "random" and any(weights),
            "data.sampling is random, which ignores the weights in data.sources; set it to epoch, or leave "
            "them out",
        ),
        (
            not all(0 <= weight < inf for weight in weights),
            "data.sources: weight cannot be negative or infinite",
        ),
        (
            any(weights) and not all(weights),
            "data.sources: weight is for all sources or for none: a source of weight 0 would never be read",
        ),
        (
            not all(map(is_sha256, indexes)),
            "data.sources: index is no SHA-256 (64 hexadecimal digits); `swarmnet index FOLDER` prints it",
        ),
        (
            has_library_index,
            f"data.sources: {STANDARD_LIBRARY} differs between versions of Python, so it has no index; leave "
            "it out",
        ),
        (
            len({source.name for source in data.sources}) < len(data.sources),
            "data.sources: each needs a name of its own; two have the same",
        ),
    ]


def _sync_rows(sync: Sync) -> list[Problem]:
    """Return the rules about `sync`: those of all methods' keys, then those of the run's own method."""
    is_local, config = sync.local_steps is not None, sync.config
    methods = ", ".join(PRESETS)
    return [
        *(problem for method in METHOD_CONFIGS.values() for problem in method.read(sync.keys).key_problems()),
        *config.problems(),
        (
            not is_local and (sync.delta_codec, sync.residual, sync.outer_lr) != ("method", "method", 0.0),
            f"sync.delta_codec, sync.residual and sync.outer_lr work with local-step methods only: {methods}",
        ),
        (
            not config.has_outer_optimizer and sync.outer_momentum != 0.9,
            f"sync.outer_momentum is for {' and '.join(OUTER_METHODS)}",
        ),
        (
            sync.topology == "sharded-reduce" and not config.can_shard,
            "sync.topology: sharded-reduce does not work with this method; set sync.method to one of "
            f"{', '.join(name for name, each in METHOD_CONFIGS.items() if each.can_shard)}",
        ),
        (
            sync.weights == "agreement" and not config.can_weigh,
            "sync.weights: agreement does not work with this method; set sync.method to "
            f"{', '.join(name for name, each in METHOD_CONFIGS.items() if each.can_weigh)}",
        ),
        (
            sync.secure_owners > 0 and not config.can_mask,
            "sync.secure_owners: only votes of sign-muon are masked; set sync.method: sign-muon",
        ),
        (
            sync.weights == "tokens" and not config.can_weigh_tokens,
            f"sync.weights: tokens works with local-step methods only: {methods}",
        ),
        (sync.learning_rate <= 0, f"sync.learning_rate is {sync.learning_rate:g}; it must be positive"),
    ]
