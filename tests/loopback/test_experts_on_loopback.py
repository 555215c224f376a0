"""Real processes of which each trains one of two groups of experts: asked meanwhile, and taken home."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import torch
from archive_scene import Scene
from model_sizes import model_keys
from public_models import logits

from peers.lab.processes import demo_report
from peers.state.checkpoint_file import newest
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole

pytestmark = [pytest.mark.loopback, pytest.mark.soak, pytest.mark.timeout(600)]
RUN = {
    "name": "mixed",
    "stages": [1, 1],
    "model": model_keys(
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        inner=32,
        head_dim=16,
        qk_norm=True,
        max_position_embeddings=64,
        experts={"num_experts": 4, "top_k": 2, "groups": 2},
    ),
    "data": {"seq_len": 32, "micro_batch_size": 2},
    "rounds": {"global_batch_tokens": 512, "snapshot_interval": 4, "finality_timeout_seconds": 2},
    "sync": {"method": "local-steps", "learning_rate": 0.01, "warmup_rounds": 1, "inner_batch_tokens": 64},
}


async def test_a_swarm_of_holders_answers_and_what_it_made_is_the_same_in_transformers(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in RUN.items()))
    (tmp_path / "book.txt").write_text("for number in range(10):\n    print(number)\n" * 20)
    scene = Scene(tmp_path)
    await scene.swarmnet(
        "publish", tmp_path / "run.yaml", "--key", tmp_path / "owner.key", "--out", tmp_path / "run.json"
    )
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, "in_flight": 2, "slots": 8}
        keys["compute_duty_cycle"] = 0.25
        workers = [
            await scene.peer(f"{which}-{stage}", {**keys, "stage": stage})
            for stage in (0, 1) for which in ("one", "two")
        ]  # fmt: skip
        await scene.until(lambda: all(scene.settled(peer)[-1:] > [8] for peer in workers), "rounds settle")
        ways = ["--run", tmp_path / "run.json", "--bootstrap", boot.addresses[0]]
        assert (await scene.swarmnet("generate", *ways, "--tokens", 12, "def ")).startswith("def ")
        said = await scene.swarmnet("evaluate", *ways, "--eval-text", tmp_path / "book.txt")
        assert 1.0 < float(re.search(r"perplexity ([\d.]+) per token", said)[1]) < 300.0
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
    for stage in range(2):
        stories = [demo_report.read_story(peer.state) for peer in workers[2 * stage : 2 * stage + 2]]
        assert {story.took_up[-1][1] for story in stories} == {0, 1}
    said = await scene.swarmnet(
        "export", "--from", tmp_path, "--hf", tmp_path / "home", "--eval-text", tmp_path / "book.txt"
    )
    assert "computes the same for 64 tokens" in said
    held = newest(tmp_path)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    ours = forward(held.whole(), held.manifest.model, whole(held.manifest.model), tokens)
    torch.testing.assert_close(ours, logits(tmp_path / "home", tokens), atol=1e-5, rtol=0)
    at_home = ["--eval-text", tmp_path / "book.txt", "--from"]
    scores = [await scene.swarmnet("evaluate", *at_home, of) for of in (tmp_path, tmp_path / "home")]
    assert scores[0] == scores[1]
    texts = [await scene.swarmnet("generate", "--from", of) for of in (tmp_path, tmp_path / "home")]
    assert texts[0] == texts[1]
