"""What a microbatch has to pass, from its start on the first stage to the gradient that is added there; a
contribution, from its making to the step of all who hold the stage; and a newcomer until it is in step."""

import asyncio

from swarm import Swarm, tiny_manifest
from walk import Walk, walking

from peers.lab.world.virtual_time import run
from peers.telemetry.events import Applied, Committed, InStep
from swarmnet.run.manifest import Rounds

LONG_ROUNDS = Rounds(
    target_tokens=10**6, longest_seconds=500.0, deadline_seconds=1.0, settle_seconds=3.0, snapshot_rounds=4
)
"""No round closes while it is watched."""
WORLD = ("peers/lab/world/virtual_time.py", "peers/runtime/lived_clock.py", "protocols/memory")
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
                if isinstance(note.what, Committed) and note.name == "a" and found.calls:
                    ended.set()
                    walk.calls = walk.calls or list(found.calls)

            swarm.on_note = noted
            await asyncio.wait_for(ended.wait(), 30.0)
        await swarm.close()

    run(story())
    walk.calls = [call for call in walk.calls if not call[0].startswith(WORLD)]
    return walk


SLOWLY = Rounds(
    target_tokens=32, longest_seconds=500.0, deadline_seconds=1.0, settle_seconds=3.0, snapshot_rounds=4
)
"""A round for each microbatch, and ten seconds until the next one: nothing else happens meanwhile."""


def slow_swarm():
    swarm = Swarm(tiny_manifest(rounds=SLOWLY))
    swarm.open()
    swarm.start("a", 0, in_flight=1, compute=lambda lane: 10.0 if lane == 2 else 0.01)
    for name, stage in (("b", 1), ("c", 2)):
        swarm.start(name, stage, in_flight=1)
    return swarm


async def walked(swarm, starts, event, *names):
    """Until each of these has noted the event after the walk began."""
    ended, missing = asyncio.Event(), set(names)
    with walking(starts) as found:
        whole = Walk()

        def noted(note):
            if found.calls and isinstance(note.what, event):
                missing.discard(note.name)
            if not missing and not ended.is_set():
                whole.calls = [call for call in found.calls if not call[0].startswith(WORLD)]
                ended.set()

        swarm.on_note = noted
        await asyncio.wait_for(ended.wait(), 60.0)
    await swarm.close()
    return whole


def walk_of_a_contribution() -> Walk:
    """From the gradient of one of two peers of a stage to the step of both."""

    async def story():
        swarm = slow_swarm()
        swarm.start("d", 1, in_flight=1)
        await swarm.until(lambda: min(len(swarm.of("applied", name)) for name in "bd") > 3, 200.0)
        return await walked(swarm, lambda file, function: function == "_make", Applied, "b", "d")

    return run(story())


def walk_of_a_newcomer() -> Walk:
    """Of a second peer of a stage, from its start until it is in step."""

    async def story():
        swarm = slow_swarm()
        await swarm.until(lambda: len(swarm.of("settled", "b")) > 3, 200.0)
        swarm.start("d", 1, in_flight=1)
        return await walked(swarm, lambda file, function: True, InStep, "d")

    return run(story())


def test_a_microbatch_of_a_run_that_skips_nothing_makes_no_call_for_skipping():
    walk = walk_of_a_microbatch()
    assert len(walk.calls) > 400, "three peers' part in it"
    assert walk.into("skipping", "cheapest_path", "reservation", "routing/capacity") == []


def test_a_microbatch_passes_few_files():
    walk = walk_of_a_microbatch()
    assert len(walk.files) <= 38, f"{len(walk.files)} files"
    assert walk.changes <= 420, f"{walk.changes} changes"


def test_a_contribution_passes_few_files():
    walk = walk_of_a_contribution()
    assert len(walk.files) <= 65, f"{len(walk.files)} files, {walk.changes} changes"


def test_a_newcomer_passes_few_files():
    walk = walk_of_a_newcomer()
    assert len(walk.files) <= 116, f"{len(walk.files)} files, {walk.changes} changes"
