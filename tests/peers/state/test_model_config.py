"""A Hugging Face configuration is understood whole, or each key that is not is named with its value."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.state.model_config import IGNORED_KEYS, IMPLEMENTED_VALUES, ROPE_KEYS, SIZE_KEYS, read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
        {"head_dim": None, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        {"layer_types": ["full_attention"] * 3, "hidden_act": "swish", "attention_dropout": 0.0},
        {"torch_dtype": "bfloat16", "eos_token_id": [1, 2], "pretraining_tp": 1, "something_new": None},
        {"sliding_window": 64},
    ],
)
def test_what_does_not_change_the_model_is_accepted(changes):
    found = read_config(LLAMA | changes)
    assert found.reasons == ()
    assert found.values["head_dim"] == 8
    assert found.values["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": None}, "architectures: null"),
        ({"architectures": []}, "architectures: []"),
        ({"architectures": [{}]}, "architectures: [{}]"),
        ({"model_type": "mistral"}, 'model_type: "mistral"'),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
         'rope_scaling: {"type": "linear", "factor": 4.0} contradict each other'),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.low_freq_factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor: 0; it must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "stretch": 1}}, "rope_scaling.stretch: 1"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, 'rope_scaling.type: "linear"'),
        *(({"rope_scaling": {"rope_type": kind, "factor": 4.0}},
           f'rope_scaling.rope_type: "{kind}" is not implemented; only "default" or "linear" or "llama3" is; '
           "to train on sequences up to the model's original length, remove rope_scaling and write that "
           "length in max_position_embeddings") for kind in ("dynamic", "yarn", "longrope")),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings: "yes"'),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: 0.5"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention: {}"),
        ({"rope_scaling": "linear"}, 'rope_scaling: "linear"'),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta: 1000000.0"),
        ({"rope_theta": True}, "rope_theta: true"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor: 0.25"),
        ({"hidden_act": "gelu_new"}, 'hidden_act: "gelu_new"'),
        ({"attention_bias": True}, "attention_bias: true"),
        ({"attention_bias": 1}, "attention_bias: 1"),
        ({"mlp_bias": "yes"}, 'mlp_bias: "yes"'),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ({"use_sliding_window": True}, "use_sliding_window: true"),
        ({"sliding_window": 63}, "sliding_window: 63 is not implemented; only null is; or write model."),
        ({"sliding_window": "all"}, 'sliding_window: "all" is not implemented; only null is'),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 8192},
         "sliding_window is missing (the default is 4096), which is not implemented"),
        ({"layer_types": ["sliding_attention"]}, 'layer_types: ["sliding_attention"]'),
        ({"quantization_config": {}}, 'quantization_config: {}'),
        ({"logits_scaling": 8.0}, 'logits_scaling: 8.0'),
        ({"attn_logit_softcapping": 50.0}, 'attn_logit_softcapping: 50.0'),
        ({"hidden_size": "wide"}, 'hidden_size: "wide"'),
        ({"num_hidden_layers": True}, "num_hidden_layers: true"),
        ({"vocab_size": 256.0}, "vocab_size: 256.0"),
        ({"hidden_size": 33}, "hidden_size: 33"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3"),
        ({"head_dim": 7}, "head_dim: 7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: NaN"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: 1000"),
        ({"max_position_embeddings": None}, "max_position_embeddings: null"),
    ],
)  # fmt: skip
def test_what_changes_the_model_is_named_with_its_value(changes, named):
    assert named in "; ".join(read_config(LLAMA | changes).reasons)


def test_qwen3_has_its_own_defaults():
    qwen = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    changes = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 64}
    found = read_config(qwen | changes)
    assert (found.reasons, found.values["head_dim"], found.values["num_key_value_heads"]) == ((), 128, 32)


ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OTHER_KEYS = ("architectures", "model_type", "sliding_window", "layer_types")
KEYS = (*OTHER_KEYS, *SIZE_KEYS, *IMPLEMENTED_VALUES, *ROPE_KEYS)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(), ANY_JSON, max_size=8))
def test_hostile_json_gives_reasons_and_no_exception(changes):
    config = json.loads(json.dumps(LLAMA | changes))
    found = read_config(config)
    assert all(reason.isascii() and reason.isprintable() for reason in found.reasons)
    unknown = [key for key in changes if key not in {*KEYS, *IGNORED_KEYS} and changes[key] is not None]
    assert len(found.reasons) >= len(unknown)
