"""Small models as others publish them: made and saved by transformers, with no code of this project.
FAMILIES has configurations of real families."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from model_sizes import model_shape
from torch import Tensor
from torch.nn import functional

from swarmnet.run.schema import ModelShape

LLAMA = model_shape(
    width=32, layers=3, heads=4, kv_heads=2, inner=64, max_position_embeddings=64, rms_norm_eps=1e-6
)
QWEN = model_shape(
    width=32,
    layers=3,
    heads=4,
    kv_heads=2,
    inner=48,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    qk_norm=True,
    rope_theta=1e6,
)


def save(folder: Path, shape: ModelShape, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A model of this shape with weights large enough that its logits differ from token to token; `changes`:
    of transformers' configuration."""
    with warnings.catch_warnings():
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    families = {False: (LlamaConfig, LlamaForCausalLM), True: (Qwen3Config, Qwen3ForCausalLM)}
    configuration, model = families[shape.qk_norm]
    keys = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    torch.manual_seed(7)
    made = model(configuration(**{**keys, **changes}))
    with torch.no_grad():  # Norms of a trained model are not all one.
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.to(dtype).save_pretrained(folder)
    return folder


def logits(folder: Path, tokens_BT: Tensor) -> Tensor:
    """Of transformers, in float32."""
    with warnings.catch_warnings():
        from transformers import AutoModelForCausalLM

        model, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, dtype=torch.float32
        )
    assert {kind: list(names) for kind, names in report.items() if names} == {}
    with torch.no_grad():
        found: Tensor = model(tokens_BT).logits
    return found


def loss(logits_BTV: Tensor, labels_BT: Tensor) -> float:
    """Cross entropy in nats a token."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten()).item()


OF_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
USUAL = {"hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True, "torch_dtype": "bfloat16"}
_LLAMA = USUAL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "pretraining_tp": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": _LLAMA
    | {
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": OF_LLAMA3,
        "tie_word_embeddings": True,
    },
    "Qwen2.5 0.5B": USUAL
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Qwen3 0.6B": USUAL
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "SmolLM2 135M": _LLAMA
    | {
        "attention_bias": False,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
    },
    "TinyLlama 1.1B": _LLAMA
    | {
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "Mistral 7B v0.3": USUAL
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Llama, linear": _LLAMA
    | {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "tie_word_embeddings": False,
    },
}
SHARE = 8
"""Width, feed-forward and heads are divided by so much, heads down to one for keys."""


def reduced(config: dict[str, Any], share: int = SHARE) -> dict[str, Any]:
    """The configuration with two layers, a vocabulary of 256, and a part of the width and the heads."""
    heads = config["num_attention_heads"]
    keys = max(1, config["num_key_value_heads"] // share)
    queries = keys * (heads // config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    explicit = {"head_dim": config["head_dim"]} if "head_dim" in config else {}
    width = config["hidden_size"] // share if explicit else queries * head_dim
    return (
        config
        | explicit
        | {
            "vocab_size": 256,
            "num_hidden_layers": 2,
            "hidden_size": width,
            "num_attention_heads": queries,
            "num_key_value_heads": keys,
            "intermediate_size": config["intermediate_size"] // share,
        }
    )


def published(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with this configuration, as it stands here, and random weights in bfloat16."""
    with warnings.catch_warnings():
        from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # Those of Qwen2 are as large as this.
                parameter.normal_(std=2.0)
            elif not name.endswith("norm.weight"):
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
