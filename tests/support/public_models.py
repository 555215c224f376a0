"""Small models as others publish them: made and saved by transformers, with no code of this project."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.run.schema import ModelShape

LLAMA = ModelShape(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
)
QWEN = ModelShape(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
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
