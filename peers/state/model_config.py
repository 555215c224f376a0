"""Read a Hugging Face `config.json`, and list each key that this program's decoder does not implement.

A reason is a line for the user: why the decoder cannot compute the model, and what to change. The functions
that get a list `reasons` add to it. An unknown key is a reason too, because it may change the model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from swarmnet.run.schema import RopeScaling, RopeTypeName

MAX_SHOWN_REASONS = 20
"""Maximum number of reasons shown; a hostile file could have any number of wrong keys."""
MAX_SHOWN_CHARACTERS = 80
"""Maximum number of characters shown of a key or a value."""
ROPE_THETA = 10000.0
"""The default of transformers if a configuration has no value."""
MAX_NUMBER = 2**31 - 1
"""Maximum of a size: tensors are indexed by int32 at the narrowest, and real models stay far below."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that the decoder implements."""

    model_type: str
    qk_norm: bool
    attention_bias: bool
    """Whether queries, keys and values have biases whatever `attention_bias` says."""
    head_dim: int | None
    """The default of transformers if `head_dim` is absent; None means hidden_size / num_attention_heads."""
    num_key_value_heads: int | None
    """The default of transformers without `num_key_value_heads`; None: the number of query heads."""
    sliding_window: int | None
    """The default of transformers if `sliding_window` is absent."""


FAMILIES = {
    "LlamaForCausalLM": Architecture("llama", False, False, None, None, None),
    "Qwen3ForCausalLM": Architecture("qwen3", True, False, 128, 32, None),
    "Qwen2ForCausalLM": Architecture("qwen2", False, True, None, 32, None),
    "MistralForCausalLM": Architecture("mistral", False, False, None, 8, 4096),
}
"""Maps architecture to its properties in transformers 5 (configuration_llama.py and its like). The first with
the properties of a run names the run's model."""
SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
)
"""Keys of `config.json` that the run file's `model` has under the same names."""
IMPLEMENTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "tie_word_embeddings": (False, True),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
"""Maps key to the values that the decoder implements; `null` and an absent key mean the first."""
ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Maps the type of rotary positions to the numbers that it needs, inside `rope_parameters` or
`rope_scaling`."""
ROPE_KEYS = ("rope_parameters", "rope_scaling")
IGNORED_KEYS = frozenset(
    (
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "pretraining_tp",
        "initializer_range",
        "max_window_layers",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "chunk_size_feed_forward",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "is_decoder",
        "tie_encoder_decoder",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "tokenizer_class",
        "prefix",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "is_llama_config",
    )
)
"""Keys that do not change the logits of the models in FAMILIES.

They are fields of PretrainedConfig of transformers 4 and 5 for generation, classification and output, and
markers of common tools."""
UNSTRETCH = (
    "to train on sequences up to the model's original length, remove {rope_key} and write that length in "
    "max_position_embeddings"
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The properties of a model in its `config.json`."""

    qk_norm: bool | None
    """True if the model normalizes queries and keys; None if the architecture is not in FAMILIES."""
    attention_bias: bool
    """Whether queries, keys and values have biases."""
    is_tied: bool
    """Whether the head is the embedding."""
    rope_scaling: RopeScaling
    values: Mapping[str, int | float]
    """Maps key of `SIZE_KEYS` to value; missing or wrong keys are left out."""
    reasons: tuple[str, ...]
    """Reasons why the decoder cannot compute this model: key, value and remedy. Empty if it can."""


def read_config(
    config: Mapping[str, Any], extra_keys: frozenset[str] = frozenset(), length: int | None = None
) -> ModelConfig:
    """Read all keys of a `config.json` except `extra_keys`, which the caller reads. Returns the model's
    sizes, and the reasons why the decoder cannot compute it on sequences of up to `length` tokens; None: of
    the model's own length. Never raises."""
    reasons: list[str] = []
    family = _read_family(config, reasons)
    values = _read_sizes(config, family, reasons)
    for key, implemented in IMPLEMENTED_VALUES.items():
        _check_value(key, config.get(key), implemented, reasons)
    theta = _read_rope_theta(config, reasons)
    if theta is not None:
        values["rope_theta"] = theta
    scaling = _read_rope_scaling(config, reasons)
    _check_attention_window(config, family, length or values.get("max_position_embeddings", 0), reasons)
    known = {"architectures", "model_type", "sliding_window", "layer_types", "rope_theta", *SIZE_KEYS}
    known.update(IMPLEMENTED_VALUES, ROPE_KEYS, IGNORED_KEYS, extra_keys)
    for key, value in config.items():
        if key not in known and value is not None:
            cure = "remove the key if it does not change what the model computes"
            reasons.append(f"{_show_key(key)}: {show(value)} is not implemented; {cure}")
    return ModelConfig(
        qk_norm=family.qk_norm if family else None,
        attention_bias=family is not None and family.attention_bias,
        is_tied=config.get("tie_word_embeddings") is True,
        rope_scaling=scaling,
        values=values,
        reasons=tuple(reasons),
    )


def join_reasons(reasons: tuple[str, ...]) -> str:
    """Return all reasons in one line, at most as many as a person reads."""
    left = len(reasons) - MAX_SHOWN_REASONS
    return "; ".join(reasons[:MAX_SHOWN_REASONS]) + (f"; and {left} more" if left > 0 else "")


def show(value: object) -> str:
    """Return a key or a value in ASCII on one line, cut to `MAX_SHOWN_CHARACTERS`."""
    if isinstance(value, str):  # Cut first: escaping the rest would be wasted.
        quoted = json.dumps(value[: MAX_SHOWN_CHARACTERS + 1])
    elif isinstance(value, dict | list):
        quoted = _show_nested(value)
    else:
        quoted = json.dumps(value)
    return quoted if len(quoted) <= MAX_SHOWN_CHARACTERS else quoted[:MAX_SHOWN_CHARACTERS] + "..."


def _show_key(key: str) -> str:
    return show(key).strip('"')


def _show_nested(value: dict[str, Any] | list[Any]) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        return "{...}" if isinstance(value, dict) else "[...]"


def _read_family(config: Mapping[str, Any], reasons: list[str]) -> Architecture | None:
    """Return the implemented architecture that a configuration names. If it names none, add a reason and
    return None. If only `model_type` is that of another architecture, add a reason."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else None
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        wanted = " or ".join(f'["{name}"]' for name in FAMILIES)
        reasons.append(f"{_describe(config, 'architectures')}; only {wanted} is implemented")
    elif config.get("model_type") not in (None, family.model_type):
        shown = _describe(config, "model_type")
        reasons.append(f"{shown} is not implemented; {architecture} has {show(family.model_type)}")
    return family


def _read_sizes(
    config: Mapping[str, Any], family: Architecture | None, reasons: list[str]
) -> dict[str, int | float]:
    """Return the valid values of `SIZE_KEYS` except `rope_theta`, and add a reason for each invalid one. An
    absent `num_key_value_heads` or `head_dim` has the default of transformers."""
    values: dict[str, int | float] = {}

    def read(key: str, is_valid: Callable[[object], bool], wanted: str, default: int | None = None) -> None:
        """Put a key's value into `values`, or add the reason that it must be `wanted`."""
        value: Any = config.get(key)
        if value is None and default is not None:
            value = default
        if is_valid(value):
            values[key] = value
        else:
            reasons.append(f"{_describe(config, key)}; it must be {wanted}")

    whole = "a whole number above 0"
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        read(key, _is_size, whole)
    read("max_position_embeddings", _is_size, whole)
    read("rms_norm_eps", _is_positive, "a number above 0")
    if "rms_norm_eps" in values:
        values["rms_norm_eps"] = float(values["rms_norm_eps"])
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if width is None or heads is None:  # The following keys depend on them.
        return values
    default_kv_heads = family.num_key_value_heads if family and "num_key_value_heads" not in config else None
    read("num_key_value_heads", _is_size, whole, default_kv_heads or int(heads))
    default_dim = family.head_dim if family and "head_dim" not in config else None
    if config.get("head_dim") is None and default_dim is None and width % heads:
        reasons.append(f"hidden_size: {width} is no multiple of num_attention_heads: {heads}; add head_dim")
        return values
    read("head_dim", _is_size, whole, default_dim or int(width // heads))
    if values.get("head_dim", 2) % 2:  # An invalid value has a reason already.
        reasons.append(f"head_dim: {values['head_dim']} must be even: rotary positions turn pairs")
    if heads % values.get("num_key_value_heads", 1):
        shown = _describe(config, "num_key_value_heads")
        reasons.append(f"{shown} must divide num_attention_heads: {heads}")
    return values


def _read_rope_theta(config: Mapping[str, Any], reasons: list[str]) -> float | None:
    """Return the base of rotary positions, `rope_theta`, given at the top or inside ROPE_KEYS; its default if
    it is given nowhere. If a value is invalid, or two differ, add a reason and return None."""
    thetas = {"rope_theta": config.get("rope_theta")}
    for rope_key in ROPE_KEYS:
        settings = config.get(rope_key)
        if isinstance(settings, dict):
            thetas[f"{rope_key}.rope_theta"] = settings.get("rope_theta")
    given = {name: value for name, value in thetas.items() if value is not None}
    invalid = {name: value for name, value in given.items() if not _is_positive(value)}
    reasons.extend(f"{name}: {show(value)} must be a number above 0" for name, value in invalid.items())
    if invalid:
        return None
    if len(set(given.values())) > 1:
        shown = ", ".join(f"{name}: {show(value)}" for name, value in given.items())
        reasons.append(f"{shown} contradict each other; keep one")
        return None
    return float(next(iter(given.values()), ROPE_THETA))


def _read_rope_scaling(config: Mapping[str, Any], reasons: list[str]) -> RopeScaling:
    """Return how ROPE_KEYS stretch rotary positions. Add a reason for each key inside them with a value that
    is not implemented, and if both are given and differ."""
    scalings: dict[str, RopeScaling] = {}
    for rope_key in ROPE_KEYS:
        settings = config.get(rope_key)
        if settings is None:
            continue
        if isinstance(settings, dict):
            scalings[rope_key] = _scaling_of(rope_key, settings, reasons)
        else:
            reasons.append(f"{rope_key}: {show(settings)} must be an object or null")
    if len(set(scalings.values())) > 1:
        shown = ", ".join(f"{rope_key}: {show(config[rope_key])}" for rope_key in scalings)
        reasons.append(f"{shown} contradict each other; keep one")
    return next(iter(scalings.values()), RopeScaling())


def _scaling_of(rope_key: str, settings: dict[str, Any], reasons: list[str]) -> RopeScaling:
    """Return the scaling in the object `settings` of `rope_key`. For a value that is not implemented, add a
    reason, and leave it out."""
    kinds = {key: settings[key] for key in ("rope_type", "type") if settings.get(key) is not None}
    for key, name in kinds.items():
        if name not in get_args(RopeTypeName) or name != next(iter(kinds.values())):
            wanted = " or ".join(map(show, get_args(RopeTypeName)))
            shown = f"{rope_key}.{key}: {show(name)} is not implemented; only {wanted} is"
            reasons.append(f"{shown}; {UNSTRETCH.format(rope_key=rope_key)}")
            return RopeScaling()
    kind: RopeTypeName = next(iter(kinds.values()), "default")
    numbers: dict[str, Any] = {}
    for key in ROPE_NUMBERS[kind]:
        is_valid, wanted = _is_positive, "a number above 0"
        if key == "original_max_position_embeddings":
            is_valid, wanted = _is_size, "a whole number above 0"
        if is_valid(settings.get(key)):
            numbers[key] = settings[key] if is_valid is _is_size else float(settings[key])
        else:
            reasons.append(f"{rope_key}.{_describe(settings, key)}; it must be {wanted}")
    known = {"rope_theta", *kinds, *ROPE_NUMBERS[kind]}
    for key, value in settings.items():
        if key not in known:
            implemented = (1,) if key == "partial_rotary_factor" else ()
            _check_value(f"{rope_key}.{key}", value, implemented, reasons)
    return RopeScaling(kind, **numbers)


def _check_attention_window(
    config: Mapping[str, Any], family: Architecture | None, length: float, reasons: list[str]
) -> None:
    """Add a reason if the model uses sliding-window attention in sequences of `length` tokens, or other
    layers than full attention. A window that `use_sliding_window: false` disables is no reason."""
    default = family.sliding_window if family else None
    window = config.get("sliding_window", default)
    is_off = config.get("use_sliding_window") is False and default is None  # Mistral ignores this key.
    if window is not None and not is_off and not (_is_size(window) and window >= length):
        shown = _describe(config, "sliding_window")
        if "sliding_window" not in config:
            shown += f" (the default is {window}), which"
        cure = "only null is"
        if _is_size(window):
            cure = f"only null is; or write model.max_position_embeddings: {window} in the run file, or less"
        reasons.append(f"{shown} is not implemented; {cure}")
    kinds = config.get("layer_types")
    is_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if kinds is not None and not is_full:
        reasons.append(f'{_describe(config, "layer_types")} is not implemented; only "full_attention" is')


def _check_value(key: str, value: object, implemented: tuple[object, ...], reasons: list[str]) -> None:
    """Add a reason if the value of `key` is neither null nor in `implemented`. There `0` does not count as
    `false`, but `1.0` counts as `1`."""
    if value is None:
        return
    if any(_is_same(value, known) for known in implemented):
        return
    only = " or ".join(map(show, implemented)) or "null"
    reasons.append(f"{_show_key(key)}: {show(value)} is not implemented; only {only} is")


def _is_same(value: object, known: object) -> bool:
    return isinstance(value, bool) == isinstance(known, bool) and value == known


def _describe(config: Mapping[str, Any], key: str) -> str:
    return f"{key}: {show(config[key])}" if key in config else f"{key} is missing"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return value > 0 and math.isfinite(float(value))
    except OverflowError:
        return False
