"""A run's owner at a terminal, and peers that are processes: held, let go on, and one sent away."""

from __future__ import annotations

import asyncio

import pytest
from archive_scene import order, owned, tokens

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(600)]

BANNED = 2
"""Exit code of whom a person has to help: a service does not start it again."""


async def test_peers_do_what_their_owner_types(tmp_path):
    async with owned(tmp_path, "ordered") as (scene, worker):
        first, last, third = [
            await scene.peer(f"worker-{number}", {**worker, "stage": stage})
            for number, stage in enumerate((0, 1, 1))
        ]
        await scene.until(lambda: min(tokens(scene)) > 0, "all train")

        assert "sent   to 0" not in await order(scene, "pause", "--reason", "new text comes at noon")
        await scene.until(
            lambda: {peer.status["state"] for peer in (first, last, third)} == {"paused_by_owner"},
            "paused_by_owner",
        )
        assert any("new text comes at noon" in line for line in first.said)
        before = tokens(scene)
        await order(scene, "resume")
        await scene.until(
            lambda: all(now > then for now, then in zip(tokens(scene), before, strict=True)), "they go on"
        )

        await order(scene, "ban", third.peer_id, "--reason", "it sends noise")
        async with asyncio.timeout(60.0):
            assert await third.process.wait() == BANNED
        assert any("it sends noise" in line for line in third.said)
        scene.peers.remove(third)
        before = tokens(scene)
        await scene.until(
            lambda: all(now > then for now, then in zip(tokens(scene), before, strict=True)),
            "the others go on without it",
        )
