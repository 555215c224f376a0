"""A run's owner plans chains at a terminal for peers that are processes, which tell it how far they are."""

from __future__ import annotations

import asyncio
import json

import pytest
from test_archive_on_loopback import RUN, Scene

from peers import event_log
from peers.run_file import publish
from protocols.identity import load_or_create

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(600)]

STAGES = (0, 1, 2, 3)


async def test_peers_keep_to_the_chain_that_their_owner_plans(tmp_path):
    (tmp_path / "first.txt").write_text("the first text. " * 3000)
    run = {**RUN, "name": "chained", "listed": False, "access": "invite", "stages": [1, 1, 1, 1]}
    run |= {"model": {**RUN["model"], "layers": 4}, "paths": {"skip_ratio": 0.25}}
    run["data"] = {**RUN["data"], "sources": RUN["data"]["sources"][:1]}
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
    publish(file, load_or_create(tmp_path / "owner.key"), tmp_path / "run.json")
    scene = Scene(tmp_path)
    owner = (tmp_path / "run.json", "--key", tmp_path / "owner.key")
    invite = await scene.swarmnet("invite", owner[0], "--anyone", *owner[1:])

    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, "text": {"first": "first.txt"}}
        keys |= {"invite": invite.strip(), "in_flight": 2, "slots": 8}
        workers = [await scene.peer(f"worker-{stage}", {**keys, "stage": stage}) for stage in STAGES]

        def committed(stage: int) -> int:
            log = workers[stage].state / "events.jsonl"
            return sum(event.name == "committed" for event in event_log.read(log)) if log.exists() else 0

        await scene.until(lambda: min(map(committed, STAGES)) > 20, "all train")
        at = ("--bootstrap", boot.addresses[0])
        shown = await scene.swarmnet("order", "chains", *owner, *at, "--dry-run")
        (chain,) = [line for line in shown.splitlines() if line.startswith("chain ")]
        assert f"0:{workers[0].peer_id[-8:]}" in chain
        assert f"3:{workers[3].peer_id[-8:]}" in chain
        assert "the run's owner has given no order" in await scene.swarmnet("orders", owner[0], *at)

        told = await scene.swarmnet("order", "chains", *owner, *at, "--minutes", 5)
        assert "microbatches of 1 origins keep to their chains" in told
        assert "chains     of 1 origins, kept to until" in await scene.swarmnet("orders", owner[0], *at)
        (chain,) = [line for line in told.splitlines() if line.startswith("chain ")]
        kept = 1 if f"1:{workers[1].peer_id[-8:]}" in chain else 2
        await scene.until(
            lambda: all(any("keep to their chains" in line for line in peer.said) for peer in workers),
            "all have heard",
        )
        await asyncio.sleep(2.0)  # What was under way goes as it had begun.
        before = {stage: committed(stage) for stage in STAGES}
        await scene.until(lambda: committed(kept) > before[kept] + 50, "they go on")
        assert committed(3 - kept) == before[3 - kept], "nothing leaves the chain"
        await scene.swarmnet("order", "unchain", *owner, *at)
        await scene.until(lambda: committed(3 - kept) > before[3 - kept] + 5, "ways are found alone again")
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
