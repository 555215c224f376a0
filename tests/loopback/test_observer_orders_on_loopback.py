"""A run's owner types orders; whoever only looks sees them: on the observer's page and in `swarmnet top`."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request

import pytest
from archive_scene import RUN, Scene

from peers.config.run_file import publish
from protocols.signed.identity import load_or_create

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = "the swarm's page is at "
WHY = "new text comes at noon"


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


async def test_whoever_only_looks_sees_what_the_owner_orders(tmp_path):
    file, published = tmp_path / "run.yaml", tmp_path / "run.json"
    run = {**RUN, "name": "ordered", "listed": False, "access": "invite"}
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
    publish(file, load_or_create(tmp_path / "owner.key"), published)
    scene = Scene(tmp_path)
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        through = ("--bootstrap", boot.addresses[0])
        observer = await scene.peer("observer", {
            "role": "observer", "run": "run.json", "bootstrap": boot.addresses,
            "observer": {"listen": "127.0.0.1:0"},
        })  # fmt: skip
        await observer.until_listening()
        await scene.until(lambda: any(line.startswith(PAGE) for line in observer.said), "a page")
        url = next(line.removeprefix(PAGE) for line in observer.said if line.startswith(PAGE))

        async def page(path="/swarm.json"):
            return await asyncio.to_thread(fetch, url.rstrip("/") + path)

        async def until_held(held):
            for _ in range(120):
                order = json.loads(await page())["ordered"]
                if order["held"] == held and order["asked_at"]:
                    return order
                await asyncio.sleep(0.5)
            raise AssertionError(order)

        await scene.until(lambda: observer.status.get("state") == "observing", "it observes")
        assert (await until_held(False))["given_at"] is None
        key = ("--key", tmp_path / "owner.key")
        await scene.swarmnet("order", "pause", published, "--reason", WHY, *key, *through)
        order = await until_held(True)
        assert (order["held_reason"], order["held_since"]) == (WHY, order["given_at"])
        held = r'\nswarmnet_swarm_held\{run="[0-9a-f]{64}"\} 1\.0\n'
        assert re.search(held, (await page("/metrics")).decode())
        told = json.loads(await page())["run"]
        assert (told["access"], told["contact"]) == ("invite", "owner@example.org")
        assert [source["licence"] for source in told["sources"]] == ["CC0-1.0", "MIT"]
        frame = (await scene.swarmnet("top", "--run", published, *through)).splitlines()
        assert "   paused_by_owner " in frame[0]
        assert any("the newest order: the run is paused" in line for line in frame)

        await scene.swarmnet("order", "resume", published, "--reason", "it came", *key, *through)
        assert (await until_held(False))["reason"] == "it came"
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
