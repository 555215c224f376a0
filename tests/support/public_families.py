"""Models as families publish them: their configurations, with random weights made by transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
USUAL = {"hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True, "torch_dtype": "bfloat16"}
LLAMA = USUAL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "pretraining_tp": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": LLAMA
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
        "rope_scaling": LLAMA3,
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
    "SmolLM2 135M": LLAMA
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
    "TinyLlama 1.1B": LLAMA
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
    "Llama, linear": LLAMA
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
