"""A model with narrow boundaries taken home: exact with our own loader, and in transformers once told."""

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharp_weights import LLAMA, page_of_what_commands_take_home, sharp_weights, stage_weights

from peers.data.tokenizer import ByteTokenizer
from peers.tools.model import hf_parity
from peers.tools.model.export import BOUNDARY, ExportError, export, load_shape, load_weights, plain_shape
from peers.tools.model.generate import generate
from peers.tools.model.model_card import card
from peers.tools.model.provenance import ModelProvenance
from swarmnet.identifiers import PeerId
from swarmnet.model.boundary import projectors
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data

FULL = replace(LLAMA, boundary=Boundary("token-anchored", width=8, after=(1, 2), seed=7))
HASHED = replace(FULL, boundary=replace(FULL.boundary, anchor_rows=32))
SHARED = replace(LLAMA, boundary=Boundary("shared-subspace", width=8, after=(1, 2), seed=7))
QWEN = replace(FULL, qk_norm=True, rms_norm_eps=1e-6)
SHAPES = pytest.mark.parametrize("shape", [FULL, HASHED, QWEN], ids=["full", "hashed", "qwen"])


@SHAPES
def test_what_is_exported_is_read_back_to_the_bit_and_anchors_and_projectors_with_it(shape, tmp_path):
    stages = stage_weights(shape, (1, 1, 1))
    export(tmp_path / "model", shape, stages)
    assert load_shape(tmp_path / "model") == shape
    read, weights = load_weights(tmp_path / "model"), {k: v for stage in stages for k, v in stage.items()}
    assert sorted(read) == sorted(weights)
    assert all(torch.equal(tensor, read[name]) for name, tensor in weights.items())
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert load_file(files[-1]).keys() == projectors(shape).keys()


@SHAPES
def test_transformers_computes_and_writes_the_same_when_told_what_it_is(shape, tmp_path):
    weights = sharp_weights(shape)
    export(tmp_path / "model", shape, [weights])
    parity = hf_parity.compare(tmp_path / "model", weights, shape, ByteTokenizer())
    assert parity.difference <= 1e-5 * parity.largest
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    prompt = torch.tensor([list(b"def ")])
    assert (forward(weights, replace(shape, boundary=Boundary()), whole(shape), prompt)
            - theirs(prompt).logits).abs().max() > 0.01, "boundaries stand there"  # fmt: skip
    made = theirs.generate(prompt, attention_mask=torch.ones(1, 4), max_new_tokens=12, do_sample=False)
    ours = b"".join(generate(weights, shape, b"def ", 12, temperature=0.0))
    assert bytes(made[0, 4:].tolist()) == ours
    with pytest.raises(ValueError, match="give input_ids, not inputs_embeds"):
        theirs(inputs_embeds=torch.zeros(1, 2, 32))


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen"])
def test_shared_directions_are_multiplied_out_to_a_plain_model_for_transformers(qk_norm, tmp_path):
    shape = replace(SHARED, qk_norm=qk_norm, rms_norm_eps=1e-6 if qk_norm else 1e-5)
    stages = stage_weights(shape, (1, 1, 1))
    export(tmp_path / "model", shape, stages)
    plain = replace(shape, boundary=Boundary())
    assert load_shape(tmp_path / "model") == plain
    config = json.loads(Path(tmp_path, "model", "config.json").read_bytes())
    assert config["model_type"] == ("qwen3" if qk_norm else "llama")
    assert BOUNDARY not in config
    weights = {name: tensor for stage in stages for name, tensor in stage.items()}
    parity = hf_parity.compare(tmp_path / "model", weights, shape, ByteTokenizer())
    assert parity.difference <= 1e-5 * parity.largest, "our narrow model and transformers' plain one"
    ours = b"".join(generate(weights, shape, b"def ", 12, temperature=0.0))
    assert b"".join(generate(load_weights(tmp_path / "model"), plain, b"def ", 12, temperature=0.0)) == ours


def test_the_page_of_a_model_of_shared_directions_says_that_it_is_a_plain_one():
    manifest = Manifest("tiny", PeerId("owner"), stages=(1, 2), model=SHARED)
    page = card(manifest, ModelProvenance(), None, None, Path("model"), shape=plain_shape(SHARED))
    assert "the first 2 layers wrote into the same 8 directions" in page
    assert "narrow_transformers" not in page
    assert f"{sum(map(prod, parameter_shapes(LLAMA, whole(LLAMA)).values())):,} parameters" in page


@pytest.mark.slow
def test_transformers_that_was_not_told_refuses_it_and_takes_it_for_no_llama(tmp_path):
    export(tmp_path / "model", FULL, stage_weights(FULL, (3,)))
    load = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", load, str(tmp_path / "model")], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode != 0
    assert "model type `swarmnet_narrow_llama` but Transformers does not recognize" in ran.stderr


@pytest.mark.parametrize("name", ["model.boundaries.1.projector.weight", "model.boundaries.2.after.weight"])
def test_a_folder_without_its_boundaries_is_refused(name, tmp_path):
    export(tmp_path / "model", FULL, stage_weights(FULL, (3,)))
    for file in (tmp_path / "model").glob("*.safetensors"):
        kept = {each: tensor for each, tensor in load_file(file).items() if each != name}
        save_file(kept, file)
    with pytest.raises(ExportError, match=name.replace(".", r"\.")):
        load_weights(tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("seed", 8, "not the one that swarmnet_boundary draws"),
        ("kind", "full", "boundaries of kind 'full'"),
        ("after", [1, 5], "stands between two of 3 layers"),
        ("after", "many", "is not of an exported model"),
        ("width", 64, "must lie between 1 and model.hidden_size"),
        ("width", None, "is not of an exported model"),
    ],
)
def test_a_configuration_that_is_not_that_of_the_model_is_refused(key, value, said, tmp_path):
    export(tmp_path / "model", FULL, stage_weights(FULL, (3,)))
    file = Path(tmp_path, "model", "config.json")
    config = json.loads(file.read_bytes())
    config[BOUNDARY][key] = value
    file.write_text(json.dumps(config))
    with pytest.raises(ExportError, match=said):
        load_weights(tmp_path / "model")


def test_as_commands_export_generate_and_evaluate_say_what_the_checkpoint_says(tmp_path, monkeypatch, capsys):
    manifest = Manifest("tiny", PeerId("owner"), stages=(1, 2), model=FULL, data=Data(seq_len=32))
    page = page_of_what_commands_take_home(manifest, tmp_path, monkeypatch, capsys)
    assert "after layers 1 and 2 8 numbers per token go on" in page
    assert "from peers.tools.model.narrow_transformers import register" in page
