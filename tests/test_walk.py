"""What a microbatch has to pass, from its start on the first stage to the gradient that is added there."""

import asyncio

from swarm import Swarm, tiny_manifest
from walk import Walk, walking

from peers.virtual_time import run
from swarmnet.manifest import Rounds

LONG_ROUNDS = Rounds(
    target_tokens=10**6, longest_seconds=500.0, deadline_seconds=1.0, settle_seconds=3.0, snapshot_rounds=4
)
"""No round closes while it is watched."""
WORLD = ("peers/virtual_time.py", "peers/clock.py", "protocols/memory")
"""The event loop and the network of the test: other ones on the internet."""


def walk_of_a_microbatch() -> Walk:
    """Through three peers in memory, one microbatch at a time, in a run that skips nothing."""
    swarm = Swarm(tiny_manifest(rounds=LONG_ROUNDS))
    walk = Walk()

    async def story():
        swarm.open()
        for stage, name in enumerate("abc"):
            swarm.start(name, stage, in_flight=1)
        await swarm.until(lambda: swarm.committed(0) >= 10, 30.0)
        ended = asyncio.Event()
        with walking(lambda file, function: function == "start" and file.endswith("next_hop.py")) as found:

            def noted(note):
                if note.event == "committed" and note.name == "a" and found.calls:
                    ended.set()
                    walk.calls = walk.calls or list(found.calls)

            swarm.on_note = noted
            await asyncio.wait_for(ended.wait(), 30.0)
        await swarm.close()

    run(story())
    walk.calls = [call for call in walk.calls if not call[0].startswith(WORLD)]
    return walk


def test_a_microbatch_of_a_run_that_skips_nothing_makes_no_call_for_skipping():
    walk = walk_of_a_microbatch()
    assert len(walk.calls) > 400, "three peers' part in it"
    assert walk.into("skipping", "pathfinder", "ahead", "scouting", "bookings", "places") == []


def test_a_microbatch_passes_few_files():
    walk = walk_of_a_microbatch()
    assert (len(walk.files), walk.changes) <= (46, 540), f"{len(walk.files)} files, {walk.changes} changes"
