"""A run's owner at a terminal, and peers that are processes: held, let go on, and one sent away."""

from __future__ import annotations

import asyncio
import json

import pytest
from archive_scene import RUN, Scene, tokens

from peers.config.run_file import publish
from protocols.signed.identity import load_or_create

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(600)]

BANNED = 2
"""Exit code of whom a person has to help: a service does not start it again."""


async def test_peers_do_what_their_owner_types(tmp_path):
    (tmp_path / "first.txt").write_text("the first text. " * 3000)
    run = {**RUN, "name": "ordered", "listed": False}
    run["data"] = {**RUN["data"], "sources": RUN["data"]["sources"][:1]}
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
    publish(file, load_or_create(tmp_path / "owner.key"), tmp_path / "run.json")
    scene = Scene(tmp_path)

    async def order(what, *arguments):
        return await scene.swarmnet(
            "order", what, tmp_path / "run.json", *arguments, "--key", tmp_path / "owner.key",
            "--bootstrap", boot.addresses[0],
        )  # fmt: skip

    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, "text": {"first": "first.txt"}}
        first, last, third = [
            await scene.peer(f"worker-{number}", {**keys, "stage": stage, "in_flight": 2, "slots": 8})
            for number, stage in enumerate((0, 1, 1))
        ]
        await scene.until(lambda: min(tokens(scene)) > 0, "all train")

        assert "told   0" not in await order("pause", "--reason", "new text comes at noon")
        await scene.until(lambda: {peer.status["state"] for peer in (first, last, third)} == {"held"}, "held")
        assert any("new text comes at noon" in line for line in first.said)
        before = tokens(scene)
        await order("resume")
        await scene.until(
            lambda: all(now > then for now, then in zip(tokens(scene), before, strict=True)), "they go on"
        )

        await order("ban", third.peer_id, "--reason", "it sends noise")
        async with asyncio.timeout(60.0):
            assert await third.process.wait() == BANNED
        assert any("it sends noise" in line for line in third.said)
        scene.peers.remove(third)
        before = tokens(scene)
        await scene.until(
            lambda: all(now > then for now, then in zip(tokens(scene), before, strict=True)),
            "the others go on without it",
        )
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
