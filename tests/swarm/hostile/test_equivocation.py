"""One that tells each side of a parted group that it is with it: they become one again all the same."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from swarm import Swarm, tiny_manifest

from peers.lab.world.virtual_time import run
from swarmnet.rounds.events import Effect, Event, ProgressArrived, SendProgress
from swarmnet.rounds.fork_choice import SIGNED_SECONDS
from swarmnet.run.manifest import Rounds

MANIFEST = tiny_manifest(
    (3,),
    rounds=Rounds(
        target_tokens=256, longest_seconds=3.0, deadline_seconds=1.0, settle_seconds=3.0, snapshot_rounds=8
    ),
)
LEFT, RIGHT = ("a", "b"), ("c", "d")


def courts(swarm: Swarm, name: str) -> None:
    """From now on it says to each what that one says itself, and does nothing else."""
    rounds = swarm.members[name].worker.update.rounds

    def handle(event: Event, _now: float) -> list[Effect]:
        if not isinstance(event, ProgressArrived):
            return []
        sets = tuple(replace(each, gathered=9, sealed=9) for each in event.sets)
        return [
            SendProgress(
                (event.peer,), event.round, 0, (), event.settled, True, event.anchor_round, event.anchor, sets
            )
        ]

    rounds.handle, rounds.next_deadline = handle, lambda: inf


def chains(swarm: Swarm) -> set[bytes | None]:
    rounds = [swarm.members[name].worker.update.rounds for name in (*LEFT, *RIGHT)]
    oldest = min(each.settled for each in rounds)
    return {each.chain.at(oldest) for each in rounds}


def test_two_halves_become_one_though_a_peer_tells_each_that_it_is_on_its_side():
    swarm = Swarm(MANIFEST, stub=True)
    parted = []

    async def story():
        swarm.open()
        for name in (*LEFT, *RIGHT, "liar"):
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: len(swarm.of("in_step")) == 5 and swarm.rounds()["a"][1] >= 3, 60.0)
        sides = [{swarm.members[name].peer for name in side} for side in (LEFT, RIGHT)]
        courts(swarm, "liar")
        swarm.network.partition(*sides)
        await swarm.until(lambda: len(chains(swarm)) == 2, 60.0)
        parted.extend(chains(swarm))
        swarm.network.heal()
        await swarm.until(lambda: swarm.of("resynchronise"), 4 * SIGNED_SECONDS)
        await swarm.until(lambda: len(chains(swarm)) == 1, 60.0)
        await swarm.during(3.0)
        assert len(chains(swarm)) == 1
        await swarm.close()

    run(story())
    assert len(parted) == 2
    gave_way = {note.name for note in swarm.of("resynchronise")}
    assert gave_way in ({*LEFT}, {*RIGHT}), "one side, and not both"
