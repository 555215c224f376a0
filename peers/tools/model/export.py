"""Export a run's weights as a Hugging Face folder and load them again: one safetensors file per stage.

With QK-norm the folder is a Qwen3ForCausalLM, with experts a Qwen3MoeForCausalLM, with biases a
Qwen2ForCausalLM, else a LlamaForCausalLM. Embedding and head are tied if they are equal.
Narrow boundaries with shared directions are multiplied out (swarmnet/model/boundary.py), so the family stays
the same. Anchored narrow boundaries need a model type of their own. Transformers refuses it until
peers/tools/model/narrow_transformers.py has registered it. The projectors, which no peer stores, are exported
to an extra file, so that another program can compute the model without drawing them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from peers.config.atomic_files import is_file, is_there
from peers.data.tokenizer import read_settings
from peers.state.model_config import ROPE_NUMBERS, join_reasons, read_config
from peers.state.safetensors_file import open_tensors
from peers.tools.model.export_folder import INDEX, ExportError, require_replaceable
from swarmnet.model.boundary import projectors, to_plain_weights
from swarmnet.model.linear import merged
from swarmnet.model.parameters import EMBEDDING, HEAD, parameter_shapes, whole
from swarmnet.run.boundary_settings import Boundary, contradictions
from swarmnet.run.schema import Experts, Lora, ModelShape

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""A file and a folder next to a tokenizer.json, as transformers writes them."""
MANIFEST_FILE = "swarmnet-manifest.json"
"""File of the canonical manifest in the exported folder; its SHA-256 is the run id."""
BOUNDARY = "swarmnet_boundary"
"""Key of config.json that gives the places and widths of boundaries (swarmnet/model/boundary.py)."""
NARROW_LLAMA, NARROW_QWEN = "swarmnet_narrow_llama", "swarmnet_narrow_qwen3"
"""Model types that only this program knows."""
OWN_KEYS = frozenset(
    (
        BOUNDARY,
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "router_aux_loss_coef",
        "output_router_logits",
    )
)
"""Keys of config.json that only some of FAMILIES have."""
FAMILIES = {
    (False, False, False, False): ("LlamaForCausalLM", "llama"),
    (True, False, False, False): ("Qwen3ForCausalLM", "qwen3"),
    (False, True, False, False): ("Qwen2ForCausalLM", "qwen2"),
    (True, False, False, True): ("Qwen3MoeForCausalLM", "qwen3_moe"),
    (False, False, True, False): ("NarrowLlamaForCausalLM", NARROW_LLAMA),
    (True, False, True, False): ("NarrowQwen3ForCausalLM", NARROW_QWEN),
}
"""Architecture and model type in config.json, by (QK-norm, biases, narrow boundaries, experts)."""


def export(
    folder: Path,
    shape: ModelShape,
    stages: Sequence[Mapping[str, Tensor]],
    *,
    tokenizer: Path | None = None,
    end: tuple[str, int] | None = None,
    replace: bool = False,
    finish: Callable[[Path, ModelShape], None] | None = None,
) -> None:
    """Write the model of `stages` (global name -> float32 for each) to `folder`, all or nothing.

    Projectors of narrow boundaries may be missing. With shared directions or LoRA factors, or if head and
    embedding are equal, the exported model has another shape and computes the same.

    `tokenizer`: its tokenizer.json; None: tokens are bytes. `end`: the end-of-text token and its id. `finish`
    is called with the complete folder, before it is moved into place, and the exported shape, to check and to
    add files. If it raises, nothing is exported. Raises ExportError if parameters are missing, unknown,
    doubled or of the wrong shape, or if the folder exists and `replace` is false.
    """
    _require_complete(shape, stages)
    if shape.boundary.kind == "shared-subspace":
        stages = [to_plain_weights(stage, shape) for stage in stages]
    stages = [merged(stage, shape) for stage in stages]
    shape, stages = _tied(plain_shape(shape), stages)
    require_replaceable(folder, replace)
    if tokenizer is not None and not is_file(tokenizer):
        raise ExportError(f"tokenizer {tokenizer} does not exist")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            partial = Path(scratch, "new")
            partial.mkdir()
            fixed = [projectors(shape)] if shape.boundary.is_narrow else []
            _write(partial, shape, [*stages, *fixed], tokenizer, end)
            _require_same(partial, stages)
            if finish is not None:
                finish(partial, shape)
            if is_there(folder):
                folder.rename(Path(scratch, "old"))
            partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"cannot write {folder}: {error}") from error


def plain_shape(shape: ModelShape) -> ModelShape:
    """Return the shape of the exported model: shared directions multiplied out, LoRA factors merged, and no
    groups of experts."""
    boundary = Boundary() if shape.boundary.kind == "shared-subspace" else shape.boundary
    experts = Experts(shape.experts.num_experts, shape.experts.top_k, shape.experts.aux_loss_coef)
    return replaced(shape, boundary=boundary, lora=Lora(), experts=experts)


def _tied(
    shape: ModelShape, stages: Sequence[Mapping[str, Tensor]]
) -> tuple[ModelShape, Sequence[Mapping[str, Tensor]]]:
    """Return the shape and the weights without the head if it has the same bits as the embedding, and all
    boundaries are full; else return them unchanged."""
    embedding, head = (
        next((stage[name] for stage in stages if name in stage), None) for name in (EMBEDDING, HEAD)
    )
    if shape.boundary.is_narrow or embedding is None or head is None or embedding.shape != head.shape:
        return shape, stages
    if not torch.equal(embedding.float().view(torch.int32), head.float().view(torch.int32)):
        return shape, stages
    kept = [{name: tensor for name, tensor in stage.items() if name != HEAD} for stage in stages]
    return replaced(shape, tie_word_embeddings=True), kept


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an exported model, or of a public one of the same form (global name -> float32).
    Raises ExportError that names the file."""
    shape = load_shape(folder)
    places: Any = {file.name: file.name for file in folder.glob("*.safetensors")}
    if len(places) != 1 or is_file(folder / INDEX):  # A small public model is one file without an index.
        places = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ExportError(f"{folder / INDEX} has no weight_map")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        file = folder / Path(name).name
        try:
            with open_tensors(file) as opened:
                weights |= {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError) as error:
            raise ExportError(f"cannot read {file}: {error}") from error
    for name, projector in projectors(shape).items():
        if not torch.equal(weights.pop(name, torch.empty(0)), projector):
            raise ExportError(f"{name} is missing or not the one that {BOUNDARY} draws: {folder} was changed")
    if len(weights) < shape.num_hidden_layers:  # Any number may be in a config.json.
        raise ExportError(f"{folder} has {len(weights)} tensors for {shape.num_hidden_layers} layers")
    _require_complete(shape, [weights])
    return weights


def load_shape(folder: Path) -> ModelShape:
    """Return the shape of an exported model, from its config.json. Raises ExportError."""
    file = folder / "config.json"
    config = _read_json(file)
    families = {name: features for features, (name, _) in FAMILIES.items()}
    try:
        qk_norm, biased, narrow, mixed = families[config["architectures"][0]]
        boundary = _boundary(config[BOUNDARY]) if narrow else Boundary()
        experts = _experts(config) if mixed else Experts()
        inner = {"intermediate_size": int(config["moe_intermediate_size"])} if mixed else {}
        deviation = float(config["initializer_range"])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ExportError(f"{file} is not of an exported model: {error!r}") from None
    plain, _ = FAMILIES[qk_norm, biased, False, False]
    found = read_config(config | {"architectures": [plain], "model_type": None}, OWN_KEYS)
    if found.reasons:
        raise ExportError(f"{file} is not of an exported model: {join_reasons(found.reasons)}")
    sizes: dict[str, Any] = dict(found.values)
    shape = ModelShape(
        **(sizes | inner),
        qk_norm=qk_norm,
        initializer_range=deviation,
        attention_bias=biased,
        tie_word_embeddings=found.is_tied,
        rope_scaling=found.rope_scaling,
        boundary=boundary,
        experts=experts,
    )
    wrong = contradictions(
        shape.boundary, shape.hidden_size, shape.vocab_size, (shape.num_hidden_layers,), skips_stages=False
    )
    for problem in wrong:
        raise ExportError(f"{folder / 'config.json'}: {problem}")
    return shape


def _boundary(settings: Mapping[str, Any]) -> Boundary:
    """Parse the boundary of a config.json. Raises KeyError, TypeError or ValueError if no export wrote it."""
    if settings["kind"] != "token-anchored":
        raise ValueError(f"boundaries of kind {settings['kind']!r}")
    after = tuple(int(layer) for layer in settings["after"])
    return Boundary(
        "token-anchored", int(settings["width"]), after, int(settings["anchor_rows"]), int(settings["seed"])
    )


def _experts(config: Mapping[str, Any]) -> Experts:
    """Parse the experts of a config.json. Raises KeyError, TypeError or ValueError for a mixture of another
    kind than this program's."""
    if not config["norm_topk_prob"] or config["decoder_sparse_step"] != 1 or config["mlp_only_layers"]:
        raise ValueError("a mixture with layers that are none, or whose shares do not sum to one")
    return Experts(
        int(config["num_experts"]), int(config["num_experts_per_tok"]), float(config["router_aux_loss_coef"])
    )


def load_end(folder: Path) -> str:
    """Return the end-of-text token in an exported model's tokenizer; empty: none. Raises ExportError."""
    if not is_file(folder / TOKENIZER_CONFIG):
        return ""
    end = _read_json(folder / TOKENIZER_CONFIG).get("eos_token")
    return end if isinstance(end, str) else ""


def _require_complete(shape: ModelShape, stages: Sequence[Mapping[str, Tensor]]) -> None:
    missing = parameter_shapes(shape, whole(shape))
    for stage in stages:
        for name, tensor in stage.items():
            expected = missing.pop(name, None)
            if expected is None:
                raise ExportError(f"{name} is twice there or no parameter of this model")
            if tuple(tensor.shape) != expected:
                raise ExportError(f"{name} is {tuple(tensor.shape)}, the model has {expected}")
    if missing:
        raise ExportError(f"{len(missing)} parameters are missing, first {next(iter(missing))}")


def _require_same(folder: Path, stages: Sequence[Mapping[str, Tensor]]) -> None:
    """Read the written weights back and compare every bit; disks report false success. Raises ExportError."""
    read = load_weights(folder)
    for stage in stages:
        for name, tensor in stage.items():
            if not torch.equal(read[name], tensor.detach().float().cpu()):
                raise ExportError(f"{folder} does not return {name} as it was written: check the disk")


def _write(
    folder: Path,
    shape: ModelShape,
    stages: Sequence[Mapping[str, Tensor]],
    tokenizer: Path | None,
    end: tuple[str, int] | None,
) -> None:
    """Write the weights as float32 in one safetensors file per stage, the configuration and the tokenizer.
    `end` is the end-of-text token and its id; None if there is none."""
    places: dict[str, str] = {}
    for number, stage in enumerate(stages, start=1):
        file = f"model-{number:05d}-of-{len(stages):05d}.safetensors"
        # Clone each: views of one flat vector share storage, which safetensors refuses.
        tensors = {name: tensor.detach().float().cpu().clone() for name, tensor in stage.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(stage, file)
    size = sum(4 * tensor.numel() for stage in stages for tensor in stage.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    for file in set(places.values()):  # safetensors makes files private, whatever the umask is.
        (folder / file).chmod((folder / INDEX).stat().st_mode)
    eos = {"eos_token_id": end[1]} if end else {}
    _write_json(folder / "config.json", _config(shape) | {"eos_token_id": None} | eos)
    generation = {"do_sample": True, "temperature": 0.8, "top_k": 40}
    _write_json(folder / "generation_config.json", generation | eos)
    of_tokenizer: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer is not None:
        of_tokenizer |= _keep_chat_template(tokenizer.parent, folder)
    _write_json(folder / TOKENIZER_CONFIG, of_tokenizer | ({"eos_token": end[0]} if end else {}))
    if tokenizer is None:
        _write_json(folder / "tokenizer.json", _byte_tokenizer())
    else:
        (folder / "tokenizer.json").write_text(read_settings(tokenizer)[0], encoding="utf-8")


def _keep_chat_template(source: Path, folder: Path) -> dict[str, Any]:
    """Copy the chat templates in files of `source`, the folder of a tokenizer.json, to `folder`. Returns the
    template in its tokenizer_config.json, and the tokens that a template may name. A template is only copied,
    never run. Raises ExportError or OSError."""
    for file in (source / CHAT_TEMPLATE, *sorted(source.glob(f"{MORE_TEMPLATES}/*.jinja"))):
        if is_file(file):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.read_bytes())
    if not is_file(source / TOKENIZER_CONFIG):
        return {}
    config = _read_json(source / TOKENIZER_CONFIG)
    kept = {"chat_template": config["chat_template"]} if config.get("chat_template") else {}
    for name in ("bos_token", "unk_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            kept[name] = token
    return kept


def _config(shape: ModelShape) -> dict[str, Any]:
    """Return the content of the Hugging Face config.json for this shape."""
    experts, scaling = shape.experts, shape.rope_scaling
    features = (shape.qk_norm, shape.attention_bias, shape.boundary.is_narrow, experts.num_experts > 0)
    architecture, model_type = FAMILIES[features]
    rope = {key: getattr(scaling, key) for key in ("rope_type", *ROPE_NUMBERS[scaling.rope_type])}
    of_experts = {
        "moe_intermediate_size": shape.intermediate_size,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": experts.aux_loss_coef,
        "output_router_logits": False,
    }
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **({BOUNDARY: asdict(shape.boundary)} if shape.boundary.is_narrow else {}),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        **(of_experts if experts.num_experts else {}),
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "initializer_range": shape.initializer_range,
        "tie_word_embeddings": shape.tie_word_embeddings,
        # Of a Qwen2 these biases are no choice, and transformers knows no such key.
        **({} if shape.attention_bias else {"attention_bias": False}),
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
        # Write both: transformers 4 reads only the others and would silently use theta 10000.
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        **({"rope_scaling": rope} if scaling.rope_type != "default" else {}),
        # Without these, Llama's defaults would make bytes 1 and 2 the start and end tokens.
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _byte_tokenizer() -> dict[str, Any]:
    """Return a byte-level BPE without merges: the token of a byte is the byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {_byte_character(byte): byte for byte in range(256)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _byte_character(byte: int) -> str:
    """Return GPT-2's character for a byte: its Latin-1 character if printable, else the next from 256."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in printed else 256 + sum(other not in printed for other in range(byte)))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ExportError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ExportError(f"{file} is not a JSON object")
    return content
