"""Real workers in memory: several newcomers join a stage that one peer alone has trained."""

from __future__ import annotations

from dataclasses import replace

from clocks import on_virtual_clock
from swarm import Swarm, tiny_manifest


@on_virtual_clock
async def test_newcomers_together_take_up_the_history_of_the_only_peer_that_trained(tmp_path):
    """They begin from the seed and the sets of all rounds, as one newcomer does, and do not outvote it."""
    manifest = tiny_manifest((2, 1))
    swarm = Swarm(replace(manifest, rounds=replace(manifest.rounds, snapshot_interval=16)), stub=True)
    swarm.open()
    swarm.start("a", 0)
    swarm.start("c", 1)
    await swarm.until(lambda: swarm.rounds().get("a", (0, -1))[1] >= 9, 60.0)
    before = swarm.digests(0)["a"][8]
    for name in ("l", "m", "n"):
        swarm.start(name, 0)
    await swarm.until(lambda: min(settled for _, settled in swarm.rounds().values()) >= 20, 60.0)
    assert [digests[8] for digests in swarm.digests(0).values()] == [before] * 4
    await swarm.close()
