"""A run's owner at a terminal, and peers that are processes: held, let go on, and one sent away."""

from __future__ import annotations

import asyncio

import pytest
from archive_scene import order, owned, tokens

from protocols.signed.identity import load_or_create

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

        with pytest.raises(AssertionError, match="nothing was ordered"):
            await order(scene, "rollback", third.peer_id, "--reason", "it sends noise")
        said = await order(scene, "rollback", third.peer_id, "--reason", "it sends noise", "--yes")
        assert "cost   stage 1: about" in said
        assert f"{third.peer_id} is banned and taken out of open rounds: it sends noise" in said
        async with asyncio.timeout(60.0):
            assert await third.process.wait() == BANNED
        assert any("it sends noise" in line for line in third.said)
        scene.peers.remove(third)
        before = tokens(scene)
        await scene.until(
            lambda: all(now > then for now, then in zip(tokens(scene), before, strict=True)),
            "the others go on without it",
        )


async def test_two_moderators_ban_a_peer_by_a_line_that_they_pass_on_and_lift_the_ban(tmp_path):
    keys = [tmp_path / f"moderator-{number}.key" for number in range(3)]
    peers = [load_or_create(key).peer_id for key in keys]
    async with owned(tmp_path, "moderated", moderators={"keys": peers, "needed": 2}) as (scene, worker):
        *_, third = [
            await scene.peer(f"worker-{number}", {**worker, "stage": stage})
            for number, stage in enumerate((0, 1, 1))
        ]
        await scene.until(lambda: min(tokens(scene)) > 0, "all train")
        run, there = tmp_path / "run.json", ("--bootstrap", scene.peers[0].addresses[0])

        async def typed(what: str, *arguments: object) -> str:
            return (await scene.swarmnet("order", what, run, *arguments, *there)).strip()

        ban = ("--reason", "it sends noise", "--sign-only", "--key")
        line = await typed("ban", third.peer_id, *ban, keys[0])
        with pytest.raises(AssertionError, match="signed by 1 moderators; 2 must sign"):
            await typed("publish", line)
        with pytest.raises(AssertionError, match="signed twice"):
            await typed("sign", line, "--key", keys[0])
        with pytest.raises(AssertionError, match="none of the run's moderators"):
            await typed("sign", line, "--key", tmp_path / "owner.key")
        line = await typed("sign", line, "--key", keys[2])
        assert "sent   to 0" not in await typed("publish", line)
        async with asyncio.timeout(60.0):
            assert await third.process.wait() == BANNED
        assert any(
            "the run's moderators have banned this peer: it sends noise" in line for line in third.said
        )
        scene.peers.remove(third)
        orders = await scene.swarmnet("orders", run, *there)
        assert f"{third.peer_id}  by the moderators: it sends noise" in orders

        line = await typed("unban", third.peer_id, "--sign-only", "--key", keys[1])
        await typed("publish", await typed("sign", line, "--key", keys[0]))
        assert third.peer_id not in await scene.swarmnet("orders", run, *there)


async def test_a_run_returns_to_the_snapshots_that_its_peers_have(tmp_path):
    async with owned(tmp_path, "returned") as (scene, worker):
        peers = [
            await scene.peer(f"worker-{number}", {**worker, "stage": stage})
            for number, stage in enumerate((0, 1))
        ]
        await scene.until(
            lambda: min(max(scene.settled(peer), default=0) for peer in peers) > 12, "they settle"
        )
        with pytest.raises(AssertionError, match="stage 0 has no snapshot of round 2 or before"):
            await order(scene, "return", 2, "--yes")
        said = await order(scene, "return", 1_000_000, "--reason", "a bug", "--yes")
        assert "cost   stage 1: to round " in said
        assert "the run returns to snapshots: stage 0 to round " in said
        points = [
            int(text.split()[0].strip(","))
            for text in said.partition("snapshots: ")[2].split("to round ")[1:3]
        ]
        await scene.until(
            lambda: (
                all(any("in step with its stage, at round" in line for line in peer.said) for peer in peers)
                and all(any("returns to snapshots" in line for line in peer.said) for peer in peers)
            ),
            "they return",
        )
        until = max(points) + 40
        await scene.until(lambda: min(max(scene.settled(peer)) for peer in peers) > until, "they train on")
        shown = await scene.swarmnet("orders", tmp_path / "run.json", "--bootstrap", peers[0].addresses[0])
        assert f"returned   stage 0 to round {points[0]}, stage 1 to round {points[1]}" in shown
