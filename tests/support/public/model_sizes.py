"""Small models, by the numbers in which those of tests differ."""

from __future__ import annotations

from typing import Any

from swarmnet.run.schema import ModelShape


def model_keys(width: int, layers: int, heads: int, inner: int, **others: Any) -> dict[str, Any]:
    """The keys `model` of a run file. Heads share the width unless `head_dim` is given; `kv_heads`: fewer
    heads of keys and values."""
    if "kv_heads" in others:
        others["num_key_value_heads"] = others.pop("kv_heads")
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": inner,
        **others,
    }


def model_shape(**sizes: Any) -> ModelShape:
    return ModelShape(**model_keys(**sizes))
