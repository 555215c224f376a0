"""Models as families publish them: their configurations, with fewer layers and tokens and random weights.

Each is read as a start in two stages, computes what transformers computes, and is exported and read again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from public_models import FAMILIES, logits, published, reduced
from safetensors.torch import load_file, save_file
from swarm import OWNER

from peers.data.tokenizer import ByteTokenizer
from peers.state.model_config import read_config
from peers.state.start_folder import StartError, open_model, start_state
from peers.tools.model import hf_parity
from peers.tools.model.export import export, load_shape, load_weights
from swarmnet.model.decoder import forward
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.parameters import EMBEDDING, HEAD, whole
from swarmnet.model.state_layout import state_layout
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Data, InitCheckpoint, ModelShape, RopeScaling

TOLERANCE = 1e-4


def manifest_of(folder: Path, stages: tuple[int, ...] = (1, 1), **changes: Any) -> Manifest:
    """What the owner of a run writes for this model: sizes of its configuration, and 512 tokens."""
    config = read_config(json.loads((folder / "config.json").read_text()), length=512)
    assert config.reasons == ()
    shape = ModelShape(
        **{**config.values, "max_position_embeddings": 512},
        qk_norm=bool(config.qk_norm),
        attention_bias=config.attention_bias,
        rope_scaling=config.rope_scaling,
    )
    manifest = Manifest(
        "m",
        OWNER.peer_id,
        stages=stages,
        model=replace(shape, **changes),
        data=Data(seq_len=128),
        init_checkpoint=InitCheckpoint("model"),
    )
    check(manifest)
    return manifest


def started(folder: Path, manifest: Manifest) -> list[dict[str, torch.Tensor]]:
    """The weights of each stage before any round."""
    stages = []
    for stage in range(len(manifest.stages)):
        units = start_state(folder, manifest, stage)
        entries = state_layout(manifest, stage).entries
        stages.append({entry.name: to_floats(units[entry.place]).view(entry.shape) for entry in entries})
    return stages


def difference(folder: Path, tokens: int = 300) -> tuple[float, float]:
    """The largest difference of a logit from that of transformers, and the largest logit."""
    manifest = manifest_of(folder)
    weights = {name: tensor for stage in started(folder, manifest) for name, tensor in stage.items()}
    tokens_BT = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = forward(weights, manifest.model, whole(manifest.model), tokens_BT)
    theirs = logits(folder, tokens_BT)
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return published(tmp_path_factory.mktemp("family") / "model", reduced(FAMILIES[request.param]))


def test_logits_are_those_of_transformers(folder):
    different, largest = difference(folder)
    assert largest > 1.0, "the model says something"
    assert different < TOLERANCE


def test_export_gives_the_same_model_back_tied_if_it_was(folder, tmp_path):
    manifest = manifest_of(folder)
    config = json.loads((folder / "config.json").read_text())
    stages, shape = started(folder, manifest), manifest.model
    weights = {name: tensor for stage in stages for name, tensor in stage.items()}

    def finish(partial: Path, exported: ModelShape) -> None:
        assert exported.tie_word_embeddings == config["tie_word_embeddings"]
        hf_parity.compare(partial, weights, shape, ByteTokenizer())

    export(tmp_path / "taken", shape, stages, finish=finish)
    again = load_shape(tmp_path / "taken")
    for key in ("attention_bias", "qk_norm", "rope_scaling", "rope_theta"):
        assert getattr(again, key) == getattr(shape, key)
    assert (HEAD in load_weights(tmp_path / "taken")) is not config["tie_word_embeddings"]
    stages[-1][HEAD][3, 2] += 2.0**-22
    export(tmp_path / "untied", shape, stages)
    untied = json.loads((tmp_path / "untied" / "config.json").read_text())
    assert untied["tie_word_embeddings"] is False
    assert torch.equal(load_weights(tmp_path / "untied")[HEAD], stages[-1][HEAD])


def test_an_export_is_a_start_again(folder, tmp_path):
    manifest = manifest_of(folder)
    stages = started(folder, manifest)
    export(tmp_path / "taken", manifest.model, stages)
    for first, second in zip(stages, started(tmp_path / "taken", manifest), strict=True):
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


# -- tied ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return published(tmp_path_factory.mktemp("tied") / "model", reduced(FAMILIES["SmolLM2 135M"]))


def test_a_run_of_one_stage_keeps_the_head_tied(tied, tmp_path):
    manifest = manifest_of(tied, (2,), tie_word_embeddings=True)
    (weights,) = started(tied, manifest)
    assert HEAD not in weights
    tokens_BT = torch.arange(64)[None]
    with torch.no_grad():
        ours = forward(weights, manifest.model, whole(manifest.model), tokens_BT)
    assert float((ours - logits(tied, tokens_BT)).abs().max()) < TOLERANCE
    export(tmp_path / "taken", manifest.model, [weights])
    assert load_shape(tmp_path / "taken").tie_word_embeddings


def test_a_run_that_ties_refuses_what_it_cannot_be(tied, tmp_path):
    with pytest.raises(ManifestError, match=r"needs one stage, and there are 2: .* set stages: \[2\]"):
        manifest_of(tied, tie_word_embeddings=True)
    untied = published(tmp_path / "untied", reduced(FAMILIES["TinyLlama 1.1B"]))
    with pytest.raises(StartError, match="has tie_word_embeddings: true; write"):
        open_model(untied, manifest_of(untied, (2,), tie_word_embeddings=True))


@pytest.mark.parametrize("kept", [EMBEDDING, HEAD])
def test_either_name_holds_a_tied_matrix(tied, kept, tmp_path):
    manifest = manifest_of(tied)
    weights = load_file(tied / "model.safetensors")
    matrix = weights.pop(EMBEDDING)
    other = tmp_path / "other"
    other.mkdir()
    save_file({**weights, kept: matrix}, other / "model.safetensors")
    (other / "config.json").write_bytes((tied / "config.json").read_bytes())
    first, second = started(other, manifest)
    assert torch.equal(first[EMBEDDING], second[HEAD])
    assert torch.equal(first[EMBEDDING], started(tied, manifest)[0][EMBEDDING])


def test_a_head_beside_a_tied_embedding_is_taken_as_transformers_takes_it(tied, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    weights = load_file(tied / "model.safetensors")
    save_file({**weights, HEAD: weights[EMBEDDING] * 0.5}, other / "model.safetensors")
    (other / "config.json").write_bytes((tied / "config.json").read_bytes())
    different, _ = difference(other, tokens=32)
    assert different < TOLERANCE
    with pytest.raises(StartError, match=r"lm_head.weight is no parameter .*tie_word_embeddings: false"):
        open_model(other, manifest_of(other, (2,), tie_word_embeddings=True))


# -- what a run file must say ---------------------------------------------------------------------------


def test_the_key_to_write_is_named(tmp_path):
    llama = published(tmp_path / "llama", reduced(FAMILIES["Llama 3.2 1B"]))
    with pytest.raises(StartError) as refused:
        open_model(llama, manifest_of(llama, rope_scaling=RopeScaling()))
    assert "has rope_scaling: {rope_type: default}; write model.rope_scaling: {" in str(refused.value)
    assert (
        "{rope_type: llama3, factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_"
        in str(refused.value)
    )
    qwen = published(tmp_path / "qwen", reduced(FAMILIES["Qwen2.5 0.5B"]))
    with pytest.raises(StartError, match=r"has attention_bias: false; write model\.attention_bias: true"):
        open_model(qwen, manifest_of(qwen, attention_bias=False))


def test_a_window_that_is_longer_than_the_runs_sequences_is_none(tmp_path):
    config = reduced(FAMILIES["Mistral 7B v0.3"]) | {"sliding_window": 512}
    mistral = published(tmp_path / "mistral", config)
    open_model(mistral, manifest_of(mistral))
    with pytest.raises(StartError, match=r"sliding_window: 512 .*max_position_embeddings: 512 in the run"):
        open_model(mistral, manifest_of(mistral, max_position_embeddings=513))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True, "qk_norm": True}, "attention_bias: no export is possible"),
        ({"rope_scaling": RopeScaling(factor=2.0)}, "factor has no effect without rope_type"),
        ({"rope_scaling": RopeScaling("linear", 0.5)}, r"factor is 0.5; it must lie in \[1"),
        ({"rope_scaling": RopeScaling("linear", 2.0, 2.0)}, "no effect without rope_type: llama3"),
        ({"rope_scaling": RopeScaling("llama3", 2.0, 4.0, 4.0)}, "low_freq_factor is 4, high_freq_factor 4"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes, said):
    with pytest.raises(ManifestError, match=said):
        check(Manifest("m", OWNER.peer_id, model=replace(ModelShape(), **changes)))


def test_a_bias_begins_as_nothing():
    from swarmnet.model.decoder import drawn_units

    name = "model.layers.0.self_attn.q_proj.bias"
    assert not drawn_units(ModelShape(), name, (8,), 0).any()
