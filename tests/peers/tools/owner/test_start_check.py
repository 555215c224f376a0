"""A run that starts from a model is checked and published with it at hand; what does not fit is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from public_models import LLAMA, save
from safetensors.torch import load_file, save_file

from peers.config.run_file import load_signed
from peers.state.start_folder import pinned

RUN = """
name: tiny
stages: [1, 2]
init_checkpoint: {path: model}
model:
  hidden_size: 32
  num_hidden_layers: 3
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 8
  intermediate_size: 64
  rms_norm_eps: 1.0e-6
  max_position_embeddings: 64
data: {seq_len: 32}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("public") / "model", LLAMA)


@pytest.fixture
def owner(swarmnet, model):
    """Writes tiny.yaml with the model beside it; returns what types commands there."""

    def write(run=RUN, **config):
        Path("tiny.yaml").write_text(run)
        shutil.copytree(model, "model")
        if config:
            file = Path("model/config.json")
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return swarmnet

    return write


def refused(swarmnet, *words, options=()):
    """Both commands refuse, in one line, and nothing is written: no published run, no owner's key."""
    for command in (["publish"], ["config", "check"]):
        code, out, err = swarmnet(*command, "tiny.yaml", *options)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (code, out, len(errors)) == (2, "", 1), err
        assert all(word in errors[0] for word in ("tiny.yaml", *words)), errors[0]
    assert not Path("tiny.run.json").exists()
    assert not Path("~/.local").expanduser().exists()


def test_what_is_published_names_the_model_and_every_stage_and_how_to_begin(owner):
    swarmnet = owner()
    assert swarmnet("config", "check", "tiny.yaml")[0] == 0
    code, out, _ = swarmnet("publish", "tiny.yaml")
    assert code == 0
    manifest = load_signed(Path("tiny.run.json")).manifest
    assert manifest.init_checkpoint == pinned(Path("model"), manifest)
    assert len(manifest.init_checkpoint.digests) == 2
    assert f"model  {manifest.init_checkpoint.sha256}" in out
    assert f"--set init_checkpoint={Path.cwd() / 'model'}" in out


def test_a_model_elsewhere_is_named_by_an_option_and_the_right_hash_passes(owner):
    swarmnet = owner()
    Path("model").rename("elsewhere")
    refused(swarmnet, "init_checkpoint.path: model is not next to the run file", "--init-checkpoint DIR")
    assert swarmnet("publish", "tiny.yaml", "--init-checkpoint", "elsewhere", "--out", "first.json")[0] == 0
    sha256 = load_signed(Path("first.json")).manifest.init_checkpoint.sha256
    Path("tiny.yaml").write_text(RUN.replace("path: model", f"path: model, sha256: {sha256}"))
    assert swarmnet("config", "check", "tiny.yaml", "--init-checkpoint", "elsewhere")[0] == 0


def test_a_wrong_hash_is_refused_with_the_right_one(owner):
    swarmnet = owner(RUN.replace("path: model", f"path: model, sha256: {'ab' * 32}"))
    refused(
        swarmnet, "is not the model that init_checkpoint.sha256 names", "sha256sum config.json *.safetensors"
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["architectures", "GemmaForCausalLM"]),
        ({"attention_bias": True}, ["attention_bias: true"]),
        ({"vocab_size": 512}, ["vocab_size: 512", "has 256", "write 512"]),
        ({"hidden_size": 64}, ["hidden_size: 64", "has 32", "write 64"]),
    ],
)
def test_another_model_than_the_run_files_is_refused(owner, config, words):
    refused(owner(**config), *words)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.layers.2.mlp.up_proj.weight", None, "model.layers.2.mlp.up_proj.weight is missing"),
        ("lm_head.weight", torch.ones(255, 32), "lm_head.weight is (255, 32), the run's model has (256, 32)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(owner, name, tensor, said):
    swarmnet, file = owner(), Path("model/model.safetensors")
    weights = {**load_file(file), name: tensor}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, file)
    refused(swarmnet, said)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"init_checkpoint: {path: model}": "init_checkpoint: {path: /srv/model}"},
            ["init_checkpoint.path", "is a place on one machine"],
        ),
        (
            {"init_checkpoint: {path: model}": "init_checkpoint: {path: ../model}"},
            ["init_checkpoint.path", "is a place on one machine"],
        ),
        ({"path: model": f"path: model, digests: [{'ab' * 32}, {'ab' * 32}]"}, ["filled in by publishing"]),
        ({"path: model": "path: model, sha256: abc"}, ["init_checkpoint: sha256 is no SHA-256"]),
        (
            {"init_checkpoint: {path: model}": "init_checkpoint: {sha256: " + "ab" * 32 + "}"},
            ["have no effect without a path"],
        ),
        ({"init_checkpoint: {path: model}": ""}, ["--init-checkpoint"]),
        (
            {"init_checkpoint: {path: model}": "", "hidden_size: 32": "hidden_size: 32\n  lora: {rank: 4}"},
            ["model.lora: needs init_checkpoint.path"],
        ),
        (
            {"hidden_size: 32": "hidden_size: 32\n  lora: {rank: 4, targets: [router]}"},
            ["model.lora.targets"],
        ),
        ({"hidden_size: 32": "hidden_size: 32\n  lora: {alpha: 4.0}"}, ["have no effect without a rank"]),
        ({"name: tiny": "name: tiny\nsync: {trainable: [nothing]}"}, ["no parameter is called 'nothing'"]),
        ({"name: tiny": "name: tiny\nsync: {trainable: [lm_head.weight]}"}, ["stage 0 has nothing to train"]),
    ],
)
def test_a_run_file_that_contradicts_itself_is_refused(owner, changes, words):
    run = RUN
    for old, new in changes.items():
        run = run.replace(old, new)
    options = ["--init-checkpoint", "model"] if words == ["--init-checkpoint"] else []
    refused(owner(run), *words, options=options)


def test_another_tokenizer_than_the_models_own_is_a_warning(owner):
    swarmnet = owner()
    Path("model/tokenizer.json").write_text("{}")
    code, _, err = swarmnet("publish", "tiny.yaml")
    assert code == 0
    assert "data.tokenizer: the model has another" in err
