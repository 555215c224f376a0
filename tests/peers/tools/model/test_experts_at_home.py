"""A mixture whose peers each train one group of experts, taken home: a plain Qwen3-MoE, groups or none."""

from dataclasses import replace

import pytest
import torch
from sharp_weights import LLAMA, page_of_what_commands_take_home, stage_weights

from peers.data.tokenizer import ByteTokenizer
from peers.tools.model import hf_parity
from peers.tools.model.export import export, load_shape, load_weights, plain_shape
from peers.tools.model.generate import generate
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Experts, Lora, Sync

HELD = replace(
    LLAMA, qk_norm=True, rms_norm_eps=1e-6, intermediate_size=24,
    experts=Experts(num_experts=6, top_k=2, groups=3, merge_rounds=5, merge_nearest=2),
)  # fmt: skip
WITH_FACTORS = replace(HELD, experts=Experts(num_experts=6, top_k=2), lora=Lora(rank=2))
SHAPES = pytest.mark.parametrize("shape", [HELD, WITH_FACTORS], ids=["groups", "lora"])


@SHAPES
def test_transformers_computes_and_writes_the_same(shape, tmp_path):
    stages = stage_weights(shape, (1, 2))
    weights = {name: tensor for stage in stages for name, tensor in stage.items()}
    export(tmp_path / "model", shape, stages)
    parity = hf_parity.compare(tmp_path / "model", weights, shape, ByteTokenizer())
    assert parity.difference <= 1e-5
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    prompt = torch.tensor([list(b"def ")])
    made = theirs.generate(prompt, attention_mask=torch.ones(1, 4), max_new_tokens=20, do_sample=False)
    ours = b"".join(generate(weights, shape, b"def ", 20, temperature=0.0))
    assert bytes(made[0, 4:].tolist()) == ours


@SHAPES
def test_what_is_read_back_is_the_same_model_and_says_nothing_of_how_it_was_trained(shape, tmp_path):
    stages = stage_weights(shape, (1, 1, 1))
    export(tmp_path / "model", shape, stages)
    read = load_shape(tmp_path / "model")
    assert read == plain_shape(shape)
    assert read.experts == Experts(num_experts=6, top_k=2)
    weights = {name: tensor for stage in stages for name, tensor in stage.items()}
    home = load_weights(tmp_path / "model")
    texts = [b"".join(generate(of, by, b"def ", 20, seed=1)) for of, by in ((weights, shape), (home, read))]
    assert texts[0] == texts[1]


def test_as_commands_export_generate_and_evaluate_say_what_the_checkpoint_says(tmp_path, monkeypatch, capsys):
    manifest = Manifest(
        "tiny", PeerId("owner"), stages=(1, 2), model=HELD, data=Data(seq_len=32),
        sync=Sync(method="local-steps"),
    )  # fmt: skip
    page = page_of_what_commands_take_home(manifest, tmp_path, monkeypatch, capsys)
    assert "of which a token takes 2; each peer trained one of 3 groups of them; every 5 rounds" in page
