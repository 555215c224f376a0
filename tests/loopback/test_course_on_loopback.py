"""A run's owner at a terminal, and peers that are processes: another learning rate, and the run's end."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from archive_scene import RUN, Scene, tokens

from peers.config.run_file import publish
from protocols.signed.identity import load_or_create

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(900)]

TOLD = 2
"""Exit code of whom a person has to help."""


async def test_a_run_gets_another_rate_and_an_end_and_whoever_comes_later_is_told(tmp_path):
    (tmp_path / "first.txt").write_text("the first text. " * 3000)
    run = {**RUN, "name": "ending", "listed": False}
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
        worker = {**keys, "in_flight": 2, "slots": 8}
        workers = [await scene.peer(f"worker-{stage}", {**worker, "stage": stage}) for stage in (0, 1)]
        await scene.until(lambda: min(tokens(scene)) > 0 and len(scene.settled(workers[0])) > 4, "all train")

        said = await order("rate", "0.5")
        ordered = int(re.search(r"from   round (\d+): the run is at round", said)[1])
        assert ordered > max(scene.settled(workers[0]))
        assert f"the learning rate is 0.5 times the manifest's from round {ordered} on" in said
        with pytest.raises(AssertionError, match="round 0 is past: the run is at round"):
            await order("end", "--from-round", "0")
        last = max(scene.settled(workers[0])) + 40
        assert f"the run ends at round {last}" in await order("end", "--from-round", last + 1)
        async with asyncio.timeout(300.0):
            assert [await peer.process.wait() for peer in workers] == [0, 0]
        assert max(scene.settled(workers[0])) == last
        for peer in workers:
            assert any("the run has ended at round" in line and "export" in line for line in peer.said)
            scene.peers.remove(peer)

        late = await scene.peer("late", {**worker, "stage": 0})
        async with asyncio.timeout(240.0):
            assert await late.process.wait() == TOLD
        assert any(f"this run has ended at round {last}" in line for line in late.said)
        scene.peers.remove(late)
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
