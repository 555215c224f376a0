"""Real processes train on private text: owners with noise, owners that see only sums of votes, and owners
that hold both ends of a model. What these send is read before it is encrypted."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from statistics import fmean

import pytest
from archive_scene import RUN, Scene, order, owned
from private_wire import Wire, token_windows
from processes import publish_run

from peers.lab.processes import demo_report

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
    scene = Scene(tmp_path)
    publish_run(tmp_path, FEDERATED)
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


def fall_of_loss(owners) -> float:
    """How much lower the newest losses are than the first, of all owners together."""
    stories = [demo_report.read_story(peer.state) for peer in owners]
    commits = sorted((commit[0], commit[4]) for story in stories for commit in story.commits if commit[4])
    losses = [loss for _, loss in commits]
    return fmean(losses[:8]) - fmean(losses[-8:]) if len(losses) >= 16 else 0.0


async def test_processes_that_see_only_sums_of_votes_learn(tmp_path: Path):
    run = {
        **FEDERATED,
        "name": "secure",
        "access": "invite",
        "rounds": {"global_batch_tokens": 512, "snapshot_interval": 4, "window": 1},
        "data": {**FEDERATED["data"], "privacy": {}},
        "sync": {"method": "sign-muon", "fragments": 1, "warmup_rounds": 1, "secure_owners": 3},
    }
    scene = Scene(tmp_path)
    publish_run(tmp_path, run)
    invite = await scene.swarmnet(
        "invite", tmp_path / "run.json", "--anyone", "--key", tmp_path / "owner.key"
    )
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        (tmp_path / "own.txt").write_text("a cat sat on the mat and sang. " * 500)
        for number in range(3):
            keys = {"run": "run.json", "bootstrap": boot.addresses, "invite": invite.strip()}
            await scene.peer(f"owner-{number}", {**keys, "data_paths": {"own": "own.txt"}})
        owners = scene.peers[1:]
        await scene.until(lambda: all(scene.settled(peer) for peer in owners), "rounds settle")
        await scene.until(lambda: fall_of_loss(owners) > 0.5, "they learn: void rounds would change nothing")
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
    stories = [demo_report.read_story(peer.state) for peer in owners]
    assert demo_report.unequal_digests(stories) == []


TEXT = "a cat sat on the mat and sang. "


async def test_processes_that_hold_both_ends_or_the_middle_learn_and_send_no_text(tmp_path: Path):
    wire = Wire(tmp_path)
    run = {
        **FEDERATED,
        "name": "u-shaped",
        "model": {**FEDERATED["model"], "num_hidden_layers": 3},
        "stages": [2, 1],
        "data": {**FEDERATED["data"], "privacy": {}, "u_shaped_layers": 1},
        "sync": {"method": "sign-muon", "fragments": 1, "warmup_rounds": 1},
    }
    scene = Scene(tmp_path)
    publish_run(tmp_path, run)
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        (tmp_path / "own.txt").write_text(TEXT * 500)
        keys = {"run": "run.json", "bootstrap": boot.addresses, "checkpoint_seconds": 5}
        scene.prefix = wire.prefix
        for number in range(2):  # Nobody is told which stage to serve.
            await scene.peer(f"owner-{number}", {**keys, "data_paths": {"own": "own.txt"}})
            await scene.peer(f"middle-{number}", keys)
        peers = scene.peers[1:]
        await scene.until(lambda: all(len(scene.settled(peer)) >= 4 for peer in peers), "rounds settle")
        await scene.until(lambda: fall_of_loss(peers) > 0.5, "they learn")
        visit = ("generate", "--run", tmp_path / "run.json", "--bootstrap", boot.addresses[0], "a cat")
        with pytest.raises(AssertionError, match=r"the run is U-shaped .*: its peers serve no texts"):
            await scene.swarmnet(*visit)
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
    stories = [demo_report.read_story(peer.state) for peer in peers]
    assert demo_report.unequal_digests(stories) == []
    assert [{commit[4] is None for commit in story.commits} for story in stories] == [{False}, {True}] * 2
    held_out = tmp_path / "held.txt"
    held_out.write_text(TEXT * 20)
    scored = await scene.swarmnet("evaluate", "--from", tmp_path, "--eval-text", held_out)
    perplexity = float(re.search(r"perplexity ([0-9.]+)", scored)[1])
    assert perplexity < 200, "of both stages together, from the peers' checkpoints"
    assert all(len(wire.sent(peer.process.pid)) > 1 << 20 for peer in peers), "hidden states and updates"
    sent = wire.all_sent()
    assert [found for found in token_windows(TEXT.encode() * 4) if found in sent] == []


async def test_the_reader_of_the_wire_finds_the_labels_that_ordinary_processes_send(tmp_path: Path):
    wire = Wire(tmp_path)
    async with owned(tmp_path, "ordinary") as (scene, keys):
        scene.prefix = wire.prefix
        for stage in range(2):
            await scene.peer(f"peer-{stage}", {**keys, "stage": stage})
        first = scene.peers[1]
        await scene.until(lambda: scene.settled(first), "a round settles")
    windows = token_windows(b"the first text. " * 4)
    assert any(found in wire.sent(first.process.pid) for found in windows)
