"""Real processes of three owners train on private text with noise, and count what their documents lose."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from archive_scene import RUN, Scene, order

from peers.config.run_file import publish
from peers.lab.processes import demo_report
from protocols.signed.identity import load_or_create

pytestmark = [pytest.mark.loopback, pytest.mark.slow]
DOCUMENTS = 400
FEDERATED = {
    **{key: RUN[key] for key in ("model", "rounds")},
    "name": "private",
    "stages": [2],
    "data": {
        "seq_len": 32, "micro_batch_size": 8, "sources": [{"name": "own", "path": "own"}], "private": True,
        "privacy": {"epsilon": 8, "epochs": 2},
    },
    "sync": {
        "method": "diloco", "outer_lr": 1, "outer_momentum": 0, "weights": "tokens",
        "optimizer_warmup_steps": 1,
    },
}  # fmt: skip


async def test_three_owners_train_on_private_text_and_stop_when_their_documents_are_used(tmp_path: Path):
    file, scene = tmp_path / "run.yaml", Scene(tmp_path)
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in FEDERATED.items()))
    publish(file, load_or_create(tmp_path / "owner.key"), tmp_path / "run.json")
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        for number, words in enumerate(("a cat sat there. ", "der Hund bellt. ", "un oiseau chante. ")):
            lines = [json.dumps({"text": f"{words * 3}{line}"}) for line in range(DOCUMENTS)]
            (tmp_path / f"own-{number}.jsonl").write_text("\n".join(lines))
            keys = {
                "run": "run.json",
                "bootstrap": boot.addresses,
                "data_paths": {"own": f"own-{number}.jsonl"},
            }
            await scene.peer(f"owner-{number}", keys)
        owners = scene.peers[1:]
        await scene.until(
            lambda: all("as often as data.privacy allows" in " ".join(p.said) for p in owners), "all"
        )
        await scene.until(lambda: all(len(scene.settled(peer)) >= 4 for peer in owners), "rounds settle")
        said = await scene.swarmnet("credit", owners[0].state)
        with pytest.raises(AssertionError, match="the run's text is private: no order may name a document"):
            await order(scene, "withdraw", "0" * 64)
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
    assert "privacy   epsilon 8.00 of 8 spent (delta 1e-05); each of 400 documents" in said
    stories = [demo_report.read_story(peer.state) for peer in owners]
    assert demo_report.unequal_digests(stories) == []
    for story in stories:
        assert 0 < len(story.commits) <= 2 * DOCUMENTS / 8
    for peer in owners:
        assert peer.process.returncode == 0, list(peer.said)
