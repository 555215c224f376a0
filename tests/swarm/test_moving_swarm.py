"""Real workers in memory, on a virtual clock: a stage that lost its peers gets one, by its own decision."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from clocks import on_virtual_clock
from swarm import TINY_MODEL, Swarm, nothing_is_committed_twice, sign, tiny_manifest

from peers.compute.executor import FORWARD
from peers.lab.world.virtual_time import run
from peers.worker import stage_moves
from protocols.errors import Unreachable
from protocols.messages.table import PeerRecord
from protocols.signed.identity import Identity
from protocols.signed.records import seal_record
from swarmnet.identifiers import PeerId, RunId
from swarmnet.placement.policy import ObservedPeer, stage_work

MANIFEST = tiny_manifest((2, 2, 1), model=replace(TINY_MODEL, num_hidden_layers=5))
WORK = stage_work(MANIFEST)
PEER = Identity.from_seed(b"a peer")
LAYER_SECONDS = 0.16
NINE = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 1, "g": 2, "h": 2, "i": 2}
CHANGE = 20.0
"""When one peer of the last stage is killed, and another becomes five times as slow."""


class Uneven(Swarm):
    """Peers of given speeds; at most all that is under way waits for the slowest stage."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(MANIFEST, seed, stub=True)
        self.speeds: dict[str, float] = {}

    def begin(self, stages: dict[str, int], moves: bool) -> None:
        for name, stage in stages.items():
            cost = lambda priority, name=name: self.cost(name, priority)  # noqa: E731 - one per peer
            self.start(name, stage, compute=cost, in_flight=16, slots=16, moves=moves)

    def cost(self, name: str, priority: int) -> float:
        if priority != FORWARD:
            return 0.001  # To drop a microbatch is work like a backward pass to the queue, and takes no time.
        stage = self.members[name].worker.stage
        return WORK[stage] * LAYER_SECONDS / self.speeds.get(name, 1.0)

    def rate(self, began: float, ended: float) -> float:
        """Microbatches per second that came back to where they started."""
        done = [
            note for note in self.of("committed") if note.fields["origin"] == self.members[note.name].peer
        ]
        return sum(began <= note.time < ended for note in done) / (ended - began)

    def stages(self) -> dict[str, int]:
        return {name: self.members[name].worker.stage for name in self.living()}


def play(
    swarm: Uneven, stages: dict[str, int], moves: bool, story: Callable[[Uneven], Awaitable[None]]
) -> Uneven:
    async def whole() -> None:
        swarm.open()
        swarm.begin(stages, moves)
        await story(swarm)
        await swarm.close()

    run(whole())
    nothing_is_committed_twice(swarm)
    return swarm


async def change(swarm: Uneven) -> None:
    await swarm.during(CHANGE)
    await swarm.crash("i")
    swarm.speeds["h"] = 0.2


def best_assignment() -> dict[str, int]:
    """Of the eight that are left after the change, by trying all."""
    names = [name for name in NINE if name != "i"]
    speeds = {name: 0.2 if name == "h" else 1.0 for name in names}

    def least(stages: tuple[int, ...]) -> float:
        return min(
            sum(speeds[name] for name, at in zip(names, stages, strict=True) if at == stage) / WORK[stage]
            for stage in range(3)
        )

    return dict(zip(names, max(product(range(3), repeat=8), key=least), strict=True))


@pytest.mark.soak
def test_a_stage_that_lost_its_peers_is_helped_within_a_minute_to_93_percent_of_the_best_assignment():
    async def watched(swarm: Uneven) -> None:
        await change(swarm)
        await swarm.during(80.0)

    async def fixed(swarm: Uneven) -> None:
        swarm.speeds["h"] = 0.2
        await swarm.during(30.0)

    moving = play(Uneven(), NINE, True, watched)
    best = play(Uneven(), best_assignment(), False, fixed).rate(10.0, 30.0)
    short = moving.rate(CHANGE + 5, CHANGE + 15)
    after = moving.rate(CHANGE + 60, CHANGE + 80)
    moved = [note for note in moving.of("assembled") if note.time > CHANGE]
    assert short < 0.75 * best
    assert after >= 0.93 * best
    assert [note.fields["stage"] for note in moved] == [2, 1], "one went, then the slow one, once each"
    assert moved[1].name == "h"
    assert moved[0].time < CHANGE + 40.0
    mover = moved[0].name
    assert any(note.time > moved[0].time for note in moving.of("committed", mover)), "it works there"
    assert len(agreed(moving, mover)) > 5
    assert len(moving.of("stage_change_started")) <= 3


def agreed(swarm: Uneven, mover: str) -> set[int]:
    """Rounds of its new stage that the mover settled; AssertionError where a peer settled another digest."""
    began = swarm.of("assembled", mover)[-1].time
    here = {
        note.fields["round"]: note.fields["digest"]
        for note in swarm.of("settled", mover)
        if note.time > began
    }
    mates = [name for name, stage in NINE.items() if stage == 2]
    left = {note.name: note.time for note in swarm.of("assembled", *mates) if note.time > CHANGE}
    theirs = [
        note.fields
        for note in swarm.of("settled", *mates)
        if note.fields["round"] in here and note.time < left.get(note.name, swarm.loop.time())
    ]
    assert all(fields["digest"] == here[fields["round"]] for fields in theirs)
    return here.keys() & {fields["round"] for fields in theirs}


def test_of_two_newcomers_that_took_the_same_stage_one_moves_to_the_stage_without_anybody():
    async def story(swarm: Uneven) -> None:
        await swarm.during(60.0)
        assert sorted(swarm.stages().values()) == [0, 1, 2]

    swarm = play(Uneven(), {"a": 0, "b": 0, "c": 2}, True, story)
    assert swarm.of("committed")
    assert len([note for note in swarm.of("assembled") if note.fields["stage"] == 1]) == 1, "one moved, once"


class HalfSilent:
    """A directory that knows a peer of stage 0, and does not answer about stage 1."""

    def __init__(self, record: bytes) -> None:
        self.record = record

    async def look_up(self, run: RunId, stage: int, deadline_seconds: float) -> dict[PeerId, bytes]:
        if stage == 1:
            raise Unreachable("no node answers")
        return {PEER.peer_id: self.record}


async def test_a_stage_about_which_the_directory_is_silent_does_not_pass_for_an_empty_one():
    signed = sign(MANIFEST)
    wire = PeerRecord(PEER.peer_id, 0, "worker", [], 0, 64.0, "0", moving_to=1)
    noted: list[str] = []
    presence = SimpleNamespace(
        signed=signed,
        directory=HalfSilent(seal_record(PEER, signed.run_id, wire, 100.0)),
        log_event=lambda event: noted.append(event.name),
    )
    found = await stage_moves._records(presence, 1)
    assert found is not None
    assert stage_moves._seen(found[PEER.peer_id], MANIFEST, 103.0) == ObservedPeer(0, 2.0, 1, 3.0)
    assert await stage_moves._records(presence, 2) is None
    assert noted == ["look_up_failed"]


@on_virtual_clock
async def test_a_peer_that_is_told_to_leave_on_its_way_to_another_stage_leaves():
    swarm = Uneven()
    swarm.open()
    swarm.begin({"a": 0, "b": 0, "c": 1, "d": 2}, moves=False)
    await swarm.during(8.0)
    worker = swarm.members["b"].worker
    worker.leave()
    worker.lifecycle.goes_to = 1  # As `Moving` does.
    worker.leave()
    await swarm.leave("b")
    assert swarm.members["b"].worker is worker
    await swarm.close()


@on_virtual_clock
async def test_a_pause_that_comes_when_a_move_was_announced_does_not_become_the_move():
    swarm = Uneven()
    swarm.speeds["c"] = 0.1
    swarm.open()
    swarm.begin({"a": 0, "b": 0, "c": 1, "d": 2}, moves=True)
    await swarm.until(lambda: swarm.of("stage_change_started"), 90.0)
    name = swarm.of("stage_change_started")[0].name
    paused, worker = swarm.members[name], swarm.members[name].worker
    worker.leave(60.0, "pausing")  # What waits for c takes longer than confirming a move.
    await swarm.until(lambda: paused.task.done() or paused.worker is not worker, 90.0)
    assert worker.lifecycle.goes_to is None
    assert paused.task.done()
    await swarm.close()


@on_virtual_clock
async def test_a_peer_that_is_told_to_leave_before_it_is_in_step_begins_nothing_and_does_not_move():
    swarm, moves = Uneven(), []
    swarm.open()
    swarm.begin({"a": 0, "b": 1, "c": 2}, moves=True)
    await swarm.until(lambda: swarm.committed() > 20, 60.0)
    swarm.begin({"d": 0}, moves=True)
    told = swarm.members["d"]
    await swarm.until(lambda: told.worker.has_weights(), 30.0)
    told.worker.served.moving.begin = lambda *known: moves.append(known)
    assert not swarm.of("in_step", "d"), "it has weights, and is not in step yet"
    begun = told.worker.services.pipeline_service.origin.next_counter
    told.worker.leave(60.0, "pausing")
    await swarm.until(lambda: told.task.done(), 90.0)
    assert told.worker.services.pipeline_service.origin.next_counter == begun
    assert not moves
    await swarm.close()
