"""A folder as Hugging Face writes it, on the grid: what is taken, and what is refused."""

import hashlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from public_models import LLAMA, QWEN, logits, loss, save
from safetensors.torch import load_file, save_file
from swarm import OWNER

from peers.compute.stage_part import build_stage_part
from peers.state.checkpoint_file import state_digest
from peers.state.start_folder import StartError, open_model, pinned, start_state
from swarmnet.model.fixed_point import UNIT, to_floats
from swarmnet.model.parameters import factor_names
from swarmnet.model.state_layout import state_layout
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import InitCheckpoint, Lora, ModelShape

TOKENS = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))


def manifest_of(shape: ModelShape, stages: tuple[int, ...] = (1, 2), **start: Any) -> Manifest:
    return Manifest(
        "m", OWNER.peer_id, stages=stages, model=shape, init_checkpoint=InitCheckpoint("model", **start)
    )


@pytest.fixture(scope="module", params=[LLAMA, QWEN], ids=["llama", "qwen"])
def shape(request) -> ModelShape:
    return request.param


@pytest.fixture(scope="module")
def folder(shape, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("public") / "model", shape)


def first_loss(manifest: Manifest, folder: Path) -> float:
    """Of TOKENS, through all stages as a run computes them before any round."""
    inputs, labels = TOKENS[:, :-1], TOKENS[:, 1:]
    stages = range(len(manifest.stages))
    parts = [build_stage_part(manifest, stage) for stage in stages]
    for stage, part in zip(stages, parts, strict=True):
        replica = part.replica(start_state(folder, manifest, stage), -1)
        part.compute.publish(replica.live_tiles(ahead=False))
    hidden = inputs
    for part in parts[:-1]:
        hidden = part.compute.forward("first", hidden)
    finished = parts[-1].compute.finish("first", hidden, labels)
    return finished.loss_sum / finished.tokens


def test_the_first_loss_of_a_run_is_that_of_transformers(shape, folder):
    theirs = loss(logits(folder, TOKENS[:, :-1]), TOKENS[:, 1:])
    assert abs(theirs - 5.545) > 0.3, "not that of a model which knows nothing"
    assert abs(first_loss(manifest_of(shape), folder) - theirs) < 1e-4


def test_with_lora_the_first_loss_is_the_same(shape, folder):
    manifest = manifest_of(replace(shape, lora=Lora(rank=4)))
    theirs = loss(logits(folder, TOKENS[:, :-1]), TOKENS[:, 1:])
    assert abs(first_loss(manifest, folder) - theirs) < 1e-4


def test_every_weight_is_within_half_a_unit_of_the_grid(shape, folder):
    manifest, theirs = manifest_of(shape), load_file(folder / "model.safetensors")
    for stage in range(2):
        units = start_state(folder, manifest, stage)
        for entry in state_layout(manifest, stage).entries:
            off = (to_floats(units[entry.place]).double() - theirs.pop(entry.name).flatten().double()).abs()
            assert off.max() <= UNIT / 2
    assert not theirs, "every parameter lies in one stage"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_taken(shape, dtype, tmp_path):
    half = save(tmp_path / "half", shape, dtype=dtype)
    theirs = loss(logits(half, TOKENS[:, :-1]), TOKENS[:, 1:])
    assert abs(first_loss(manifest_of(shape), half) - theirs) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "share", "size"), [(torch.bfloat16, 2e-3, 2e-7), (torch.float32, 1.0, 5e-6)]
)
def test_rounding_costs_as_little_as_the_docs_say(shape, dtype, share, size, tmp_path):
    folder, manifest = save(tmp_path / "m", shape, dtype=dtype, initializer_range=0.02), manifest_of(shape)
    model = open_model(folder, manifest)
    moved, all_of_them, error, whole_of_it = 0, 0, 0.0, 0.0
    for stage in range(2):
        units = start_state(folder, manifest, stage)
        for entry in state_layout(manifest, stage).entries:
            theirs = model.tensor(entry.name).flatten().double()
            off = to_floats(units[entry.place]).double() - theirs
            moved, all_of_them = moved + int((off != 0).sum()), all_of_them + len(off)
            error, whole_of_it = error + float((off**2).sum()), whole_of_it + float((theirs**2).sum())
    assert moved <= share * all_of_them
    assert error <= size**2 * whole_of_it


def test_publishing_names_the_folder_as_sha256sum_does_and_every_stage(shape, folder):
    manifest = manifest_of(shape)
    start = pinned(folder, manifest)
    command = "sha256sum config.json *.safetensors | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=folder, capture_output=True, check=True)
    assert start.sha256 == printed.stdout.split()[0].decode()
    made = [state_digest(-1, start_state(folder, manifest, stage)).hex() for stage in range(2)]
    assert start.digests == tuple(made)
    assert start_state(folder, replace(manifest, init_checkpoint=start), 1).dtype == torch.int32
    assert pinned(folder, replace(manifest, init_checkpoint=start)) == start


def test_a_model_in_several_files_is_the_same_weights(folder, shape, tmp_path):
    weights = load_file(folder / "model.safetensors")
    names, parts = sorted(weights), tmp_path / "parts"
    parts.mkdir()
    places = {}
    for number, some in enumerate((names[:7], names[7:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in some}, parts / file)
        places |= dict.fromkeys(some, file)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (parts / "config.json").write_bytes((folder / "config.json").read_bytes())
    manifest = manifest_of(shape)
    assert pinned(parts, manifest).digests == pinned(folder, manifest).digests
    del places[names[0]]
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(StartError, match="does not say what the safetensors files"):
        open_model(parts, manifest)


def test_factors_are_drawn_by_the_seed_and_begin_as_nothing(shape, folder):
    manifest = manifest_of(replace(shape, lora=Lora(rank=2, targets=("q_proj", "down_proj"))))
    units, state = start_state(folder, manifest, 0), state_layout(manifest, 0)
    values = {entry.name: units[entry.place] for entry in state.entries}
    factors = [name for name in values if ".lora_" in name]
    assert len(factors) == 4
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        down, up = factor_names(name)
        assert values[down].any()
        assert not values[up].any()
    other = start_state(folder, replace(manifest, seed=1), 0)
    assert not torch.equal(other, units)


# -- refused ------------------------------------------------------------------------------------------


def changed_config(folder: Path, to: Path, **changes: Any) -> Path:
    to.mkdir()
    (to / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


def changed_weights(folder: Path, to: Path, **changes: Any) -> Path:
    """`None` takes a tensor out."""
    weights = {**load_file(folder / "model.safetensors"), **changes}
    to.mkdir()
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def test_a_configuration_of_another_model_is_refused_with_every_reason_at_once(folder, shape, tmp_path):
    changes = {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "vocab_size": 300,
        "max_position_embeddings": 32,
        "final_logit_softcapping": 30.0,
    }
    with pytest.raises(StartError) as refused:
        open_model(changed_config(folder, tmp_path / "other", **changes), manifest_of(shape))
    for reason in (
        'rope_scaling: {"type": "linear", "factor": 4.0} contradict', "vocab_size: 300",
        "max_position_embeddings: 32", "final_logit_softcapping: 30.0",
    ):  # fmt: skip
        assert reason in str(refused.value)
    assert "write model.rope_scaling" not in str(refused.value), "nobody knows which"


def test_the_other_family_is_refused_with_the_key_to_write(folder, shape):
    wrong = replace(shape, qk_norm=not shape.qk_norm)
    with pytest.raises(StartError, match=f"write model.qk_norm: {str(shape.qk_norm).lower()}"):
        open_model(folder, manifest_of(wrong))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lm_head.weight": None}, "lm_head.weight is missing; there are .* tensors in 1 safetensors file"),
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight is \(31,\), the run's model has \(32,\)"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "q_proj.bias is no parameter of the"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "is I8; numbers must be one of F64, F32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_is_read(folder, shape, tmp_path, changes, said):
    with pytest.raises(StartError, match=said):
        open_model(changed_weights(folder, tmp_path / "other", **changes), manifest_of(shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -512.0])
def test_a_weight_that_the_grid_does_not_reach_is_refused(folder, shape, tmp_path, value):
    wrong = torch.ones(32)
    wrong[3] = value
    other = changed_weights(folder, tmp_path / "other", **{"model.norm.weight": wrong})
    with pytest.raises(StartError, match=r"norm.weight has a value that is not finite, or 512 and more"):
        pinned(other, manifest_of(shape))


def test_old_buffers_are_passed_over(folder, shape, tmp_path):
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    other = changed_weights(folder, tmp_path / "other", **buffers)
    assert pinned(other, manifest_of(shape)).digests == pinned(folder, manifest_of(shape)).digests


def test_another_model_than_the_run_names_is_refused(folder, shape, tmp_path):
    with pytest.raises(StartError, match=r"is not the model that init_checkpoint.sha256 names"):
        pinned(folder, manifest_of(shape, sha256=hashlib.sha256(b"other").hexdigest()))
    published = replace(manifest_of(shape), init_checkpoint=pinned(folder, manifest_of(shape)))
    other = changed_weights(folder, tmp_path / "other", **{"lm_head.weight": torch.zeros(256, 32)})
    start_state(other, published, 0)
    with pytest.raises(StartError, match=r"other weights than those that the run starts from \(stage 1\)"):
        start_state(other, published, 1)


def test_files_that_are_none_are_refused(folder, shape, tmp_path):
    manifest = manifest_of(shape)
    with pytest.raises(StartError, match=r"cannot read .*config.json"):
        open_model(tmp_path / "nowhere", manifest)
    other = changed_config(folder, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"\x80\x05pickled")
    with pytest.raises(StartError, match="is no safetensors file that can be read"):
        open_model(other, manifest)
    (other / "model.safetensors").unlink()
    (other / "pytorch_model.bin").write_bytes(b"\x80\x05pickled")
    with pytest.raises(StartError, match="is missing; there are 0 tensors in 0 safetensors files"):
        open_model(other, manifest)
    (other / "config.json").write_text("[1]")
    with pytest.raises(StartError, match="is not a JSON object"):
        open_model(other, manifest)
