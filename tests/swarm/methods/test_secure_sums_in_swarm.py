"""Real workers sum masked votes: an owner that dies costs some rounds, and the others sum on without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swarm import Swarm, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from swarmnet.optimizer.secure_sums.masked_votes import MaskedTally
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Data, Sync, TextSource

pytestmark = pytest.mark.swarm
OWNERS = ("a", "b", "c", "d")


def test_owners_train_by_sums_alone_and_go_on_without_one_that_dies(monkeypatch):
    base = tiny_manifest(
        (3,),
        access="invite",
        data=Data((TextSource("own", "own"),), seq_len=16, micro_batch_size=2, private=True),
        sync=Sync("sign-muon", learning_rate=8e-3, warmup_rounds=1, fragments=1, secure_owners=4),
    )
    manifest = replace(base, rounds=replace(base.rounds, window=1))
    check(manifest)
    summed = set()

    def step(tally, *factor):
        found = plain_step(tally, *factor)
        if found.signs.any():
            summed.add(tally._round)
        return found

    plain_step = MaskedTally.step
    monkeypatch.setattr(MaskedTally, "step", step)
    swarm = Swarm(replace(manifest, access="open"))

    async def story():
        swarm.open()
        for name in OWNERS:
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: len(summed) >= 12, 300.0)
        await swarm.crash("d")
        died = max(current for current, _ in swarm.rounds().values())
        await swarm.until(lambda: len([round for round in summed if round > died + 4]) >= 12, 300.0)
        await swarm.close()
        return died

    died = run(story())
    assert shared_rounds(swarm) >= 24
    assert min(summed) >= 4, "no votes leave before members are known"
    after = [round for round in range(died, max(summed) + 1) if round not in summed]
    assert len(after) <= 3 * 4, f"rounds {after} were void"
    losses = swarm.losses()
    assert sum(losses[-20:]) < sum(losses[:20])
