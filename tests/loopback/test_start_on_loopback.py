"""Real processes go on from a model that others made: two peers or an archivist have its folder, the others
get it from them; then it is taken home."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from archive_scene import Scene
from model_sizes import model_keys
from public_models import FAMILIES, LLAMA, logits, published, reduced, save

from peers.lab.processes import demo_report
from peers.state.checkpoint_file import newest
from peers.state.model_config import read_config
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole

pytestmark = [pytest.mark.loopback, pytest.mark.soak, pytest.mark.timeout(600)]
RUN = {
    "name": "further", "stages": [1, 2], "init_checkpoint": {"path": "model"},
    "data": {"seq_len": 32, "micro_batch_size": 2},
    "rounds": {"global_batch_tokens": 512, "snapshot_interval": 4, "finality_timeout_seconds": 2},
}  # fmt: skip
SHAPE = model_keys(
    width=32, layers=3, heads=4, kv_heads=2, inner=64, rms_norm_eps=1e-6, max_position_embeddings=64
)


def digests(peer) -> dict[int, str]:
    return {round: told.digest for round, told in demo_report.read_story(peer.state).settled.items()}


@pytest.mark.parametrize(
    ("lora", "archived"),
    [({}, False), ({"lora": {"rank": 2}}, True)],
    ids=["peers have it", "an archivist, lora"],
)
async def test_processes_start_from_a_model_train_agree_and_export_it(
    tmp_path: Path, lora: dict[str, object], archived: bool
) -> None:
    save(tmp_path / "model", LLAMA)
    run = {**RUN, "model": {**SHAPE, **lora}}
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
    scene = Scene(tmp_path)
    said = await scene.swarmnet(
        "publish", tmp_path / "run.yaml", "--key", tmp_path / "owner.key", "--out", tmp_path / "run.json"
    )
    assert f"start={tmp_path / 'model'}" in said
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, "in_flight": 2, "slots": 8}
        has: dict[str, object] = {"init_checkpoint": "model"}
        if archived:
            keeps = {"role": "archivist", "archive": str(tmp_path / "kept")}
            await scene.peer("archivist", {**keys, **has, **keeps})
            has = {}
        having = [await scene.peer(f"one-{n}", {**keys, "stage": n, **has}) for n in (0, 1)]
        getting = [await scene.peer(f"two-{n}", {**keys, "stage": n}) for n in (0, 1)]
        workers = [*having, *getting]
        await scene.until(lambda: all(scene.settled(peer)[-1:] > [8] for peer in workers), "rounds settle")
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
    for one, other in zip(having, getting, strict=True):
        ours, theirs = digests(one), digests(other)
        shared = ours.keys() & theirs.keys()
        assert shared
        assert all(ours[round] == theirs[round] for round in shared)
    await scene.swarmnet("export", "--from", tmp_path, "--hf", tmp_path / "home")
    assert_trained_and_taken_home(tmp_path)


def assert_trained_and_taken_home(folder: Path) -> None:
    """The export in `home` has the logits of the checkpoints, and others than the start in `model`."""
    held = newest(folder)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    ours = forward(held.whole(), held.manifest.model, whole(held.manifest.model), tokens)
    torch.testing.assert_close(ours, logits(folder / "home", tokens), atol=1e-4, rtol=0)
    assert not torch.allclose(ours, logits(folder / "model", tokens), atol=1e-2), "it has been trained"


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_model_of_each_family_is_trained_in_two_stages_by_three_processes(
    tmp_path: Path, family: str
) -> None:
    config = reduced(FAMILIES[family])
    found = read_config(json.loads((published(tmp_path / "model", config) / "config.json").read_text()))
    stretched = {**config["rope_scaling"]} if config.get("rope_scaling") else {"rope_type": "default"}
    stretched.setdefault("rope_type", stretched.pop("type", None))
    keys = {"qk_norm": found.qk_norm, "attention_bias": found.attention_bias, "rope_scaling": stretched}
    run = {**RUN, "stages": [1, 1], "model": {**found.values, **keys, "max_position_embeddings": 64}}
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
    scene = Scene(tmp_path)
    await scene.swarmnet(
        "publish", tmp_path / "run.yaml", "--key", tmp_path / "owner.key", "--out", tmp_path / "run.json"
    )
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        peer = {"run": "run.json", "bootstrap": boot.addresses, "in_flight": 2, "slots": 8}
        has: dict[str, object] = {"init_checkpoint": "model"}
        workers = [await scene.peer(f"one-{stage}", {**peer, "stage": stage, **has}) for stage in (0, 1)]
        workers.append(await scene.peer("two-1", {**peer, "stage": 1}))
        await scene.until(lambda: all(scene.settled(one)[-1:] > [20] for one in workers), "rounds settle")
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
    said = await scene.swarmnet("export", "--from", tmp_path, "--hf", tmp_path / "home")
    assert "untied embedding and head differ: both are written, tie_word_embeddings: false" in said
    assert_trained_and_taken_home(tmp_path)
