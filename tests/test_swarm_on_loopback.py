"""A real swarm on 127.0.0.1: a bootstrap and four peers as processes with a p2pd each, a kill, a join."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from peers.demo import report as demo_report
from peers.demo.peers import DemoPeer, start
from peers.demo.report import PeerStory
from peers.demo.show import LOOPBACK
from peers.run_file import publish
from protocols.identity import load_or_create

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

RUN = {
    "name": "loopback", "stages": [1, 1],
    "model": {
        "layers": 2, "width": 64, "heads": 4, "key_value_heads": 4, "head_width": 16, "feed_forward": 128,
    },
    "data": {"sequence_tokens": 64, "microbatch_sequences": 4},
    "rounds": {"target_tokens": 2048, "snapshot_rounds": 8},
}  # fmt: skip
PATIENCE_SECONDS = 120.0
COMMITS = 12


class Scene:
    """The processes, and what their event logs say so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot: DemoPeer | None = None
        self.peers: list[DemoPeer] = []

    async def begin(self) -> None:
        file = self.folder / "run.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in RUN.items()))
        publish(file, load_or_create(self.folder / "owner.key"), self.folder / "run.json")
        self.boot = await start(self.folder, "boot", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
        await self.boot.until_listening()
        for number in range(4):
            await self.worker(number // 2)

    async def worker(self, stage: int | str) -> DemoPeer:
        assert self.boot is not None
        keys = {
            "run": "run.json", "bootstrap": self.boot.addresses, "stage": stage, "in_flight": 2, "slots": 8,
            **LOOPBACK,
        }  # fmt: skip
        self.peers.append(await start(self.folder, f"peer-{len(self.peers)}", keys))
        return self.peers[-1]

    async def end(self) -> None:
        await asyncio.gather(*(peer.stop(60.0) for peer in self.peers))
        if self.boot is not None:
            await self.boot.stop(60.0)

    def story(self, peer: DemoPeer) -> PeerStory:
        if not (peer.state / "events.jsonl").exists():
            return PeerStory("")
        return demo_report.read_story(peer.state)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            words = {peer.name: list(peer.said)[-2:] for peer in self.peers}
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_SECONDS:g} s; {words}"
            ended = [peer.name for peer in self.peers if not peer.alive and peer.killed_at is None]
            assert not ended, f"{ended} ended by themselves; {words}"
            await asyncio.sleep(0.5)


async def test_a_real_swarm_trains_survives_a_kill_and_takes_in_a_newcomer(tmp_path):
    scene = Scene(tmp_path)
    try:
        await scene.begin()
        commits = lambda peer: len(scene.story(peer).commits)  # noqa: E731 - asked over and over below
        await scene.until(lambda: all(commits(peer) >= COMMITS for peer in scene.peers), "all four train")
        victim = scene.peers[3]
        victim.kill()
        newcomer = await scene.worker("auto")

        def accepted() -> bool:
            maker = scene.story(newcomer).peer
            return bool(maker) and any(who == maker for _, who in scene.story(scene.peers[2]).took)

        await scene.until(accepted, "the newcomer contributes")
        await scene.until(lambda: commits(newcomer) >= COMMITS, "microbatches go through the newcomer")
    finally:
        await scene.end()
    stories = [scene.story(peer) for peer in scene.peers]
    for peer, story in zip(scene.peers, stories, strict=True):
        assert peer.killed_at is not None or peer.process.returncode == 0, list(peer.said)
        keys = [(origin, counter) for _, origin, counter, _, _ in story.commits]
        assert len(keys) == len(set(keys)), f"{peer.name} committed a microbatch twice"
    assert stories[4].stage == 1, "the stage that lost a peer"
    losses = [
        loss for _, loss in sorted((c[0], c[4]) for s in stories if s.stage == 0 for c in s.commits if c[4])
    ]  # fmt: skip
    assert fmean(losses[:8]) > 5.0
    assert fmean(losses[-8:]) < fmean(losses[:8]) - 0.5
    assert demo_report.unequal_digests(stories) == []
    assert len(stories[2].digests.keys() & stories[4].digests.keys()) >= 1
    assert len(stories[0].digests.keys() & stories[1].digests.keys()) >= 3
    waited = demo_report.kill_to_commit_seconds(stories, 1, victim.killed_at)
    assert waited is not None, "others went on, without anybody's order"
    assert waited < 3.0
    repeats, all_commits = demo_report.repeats_across_peers(stories)
    assert repeats <= 0.05 * all_commits, "at most what the killed peer had under way"
