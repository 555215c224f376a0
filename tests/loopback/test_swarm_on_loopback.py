"""A real swarm on 127.0.0.1: a bootstrap and four peers as processes with a p2pd each, a kill, a join."""

from __future__ import annotations

from statistics import fmean

import pytest
from swarm_scene import Scene

from peers.lab.processes import demo_report

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

COMMITS = 12


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
            contributor = scene.story(newcomer).peer
            return bool(contributor) and any(
                who == contributor for _, who in scene.story(scene.peers[2]).took
            )

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
    assert len(stories[2].settled.keys() & stories[4].settled.keys()) >= 1
    assert len(stories[0].settled.keys() & stories[1].settled.keys()) >= 3
    waited = demo_report.kill_to_commit_seconds(stories, 1, victim.killed_at)
    assert waited is not None, "others went on, without anybody's order"
    assert waited < 3.0
    repeats, all_commits = demo_report.repeats_across_peers(stories)
    assert repeats <= 0.05 * all_commits, "at most what the killed peer had under way"
