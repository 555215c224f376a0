"""A process that stood still and goes on takes nobody for silent, and loses no patience, by that time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.lab.faults.play import small_manifest
from peers.lab.world.gated_clock import GATE, Gate, GatedLoop
from peers.lab.world.world import World
from peers.runtime import lived_clock
from peers.runtime.lived_clock import READING_SECONDS, STOOD_SECONDS, Clock, LivedTime
from peers.runtime.timer import Timer

steps = st.lists(st.one_of(st.floats(0.0, STOOD_SECONDS), st.floats(STOOD_SECONDS + 0.01, 1e5)), max_size=40)


@given(steps)
def test_lived_time_never_goes_back_and_leaves_out_exactly_the_stops(lengths):
    lived, now, before = LivedTime(0.0), 0.0, 0.0
    for length in lengths:
        now += length
        after = lived.at(now)
        assert before <= after <= before + STOOD_SECONDS
        before = after
    stood = [length for length in lengths if length > STOOD_SECONDS]
    assert lived.stops == len(stood)
    assert lived.skipped == pytest.approx(sum(stood) + len(stood) * READING_SECONDS)


def test_after_a_stop_the_clock_stands_until_what_came_in_is_read():
    lived = LivedTime(10.0)
    lived.at(10.5)
    assert lived.at(32.5) == 10.5
    assert lived.at(32.5 + 0.9 * READING_SECONDS) == 10.5
    assert lived.at(32.5 + READING_SECONDS + 0.25) == 10.75


def gated(story):
    """Run `story` on a virtual clock on which single peers can stand still."""
    with asyncio.Runner(loop_factory=GatedLoop) as runner:
        return runner.run(story())


def test_a_timer_that_became_due_during_a_stop_fires_when_its_time_is_lived():
    async def story():
        loop, gate, fired, stops = asyncio.get_running_loop(), Gate(), [], []
        token = GATE.set(gate)
        own = Clock(stops.append)
        timer = Timer(lambda: fired.append(loop.time()), own)
        timer.arm(own.time() + 3.0)
        GATE.reset(token)
        await asyncio.sleep(2.0)
        gate.shut = True
        await asyncio.sleep(60.0)
        assert fired == []
        gate.open()
        await asyncio.sleep(0.5)
        assert fired == []
        await asyncio.sleep(20.0)
        own.close()
        assert fired == [pytest.approx(63.0 + READING_SECONDS, abs=2 * lived_clock.PULSE_SECONDS)]
        assert stops == [pytest.approx(60.0, abs=lived_clock.PULSE_SECONDS)]

    gated(story)


def thawed(folder, seconds):
    """What the other three of a stage see, and what it does, when a peer stood still for so long."""

    async def story():
        world = World(manifest=small_manifest(1, 4, None, 5), seed=5, disk=folder)
        for number in range(4):
            world.start(f"p{number}", 0)
        await asyncio.sleep(15.0)
        frozen = world.members["p1"]
        world.freeze(frozen)
        await asyncio.sleep(seconds)
        at = asyncio.get_running_loop().time()
        frozen.gate.open()
        await asyncio.sleep(0.01)  # As on a real machine, timers come first, and then the sockets.
        world.network.thaw(frozen.peer)
        while min(world.settled(0).values()) < max(world.settled(0).values()) - 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        took = asyncio.get_running_loop().time() - at
        await asyncio.sleep(5.0)
        await world.close()
        return took, [(n.event, n.fields) for n in world.journal.events if n.name == "p1" and n.time >= at]

    return gated(story)


@pytest.mark.parametrize("seconds", [3.0, 12.0])
def test_a_thawed_peer_takes_nobody_for_silent_gives_no_history_up_and_is_soon_in_step(tmp_path, seconds):
    took, events = thawed(tmp_path, seconds)
    names = [event for event, _ in events]
    assert "process_stalled" in names
    assert ("unlinked", "silent") not in [(event, fields.get("reason")) for event, fields in events]
    forks = [fields["fork_round"] for event, fields in events if event == "resync"]
    assert set(forks) <= {None}
    assert took < 5.0


def most_stand_still(folder, seconds, sharded):
    """What three of one stage note, of whom two stand still for so long."""

    async def story():
        world = World(manifest=small_manifest(1, 3, None, 3, sharded), seed=3, disk=folder)
        for number in range(3):
            world.start(f"p{number}", 0)
        await asyncio.sleep(15.0)
        still = [world.members[name] for name in ("p0", "p1")]
        for member in still:
            world.freeze(member)
        await asyncio.sleep(seconds)
        for member in still:
            member.gate.open()
        await asyncio.sleep(0.01)
        for member in still:
            world.network.thaw(member.peer)
        await asyncio.sleep(15.0)
        settled = world.settled(0)
        await world.close()
        assert max(settled.values()) - min(settled.values()) <= 4
        return world.journal.events

    return gated(story)


@pytest.mark.parametrize(
    ("seconds", "sharded"),
    [(8.0, False), (8.0, True), (40.0, False)],
    ids=["8 s", "8 s, sharded", "40 s"],
)
def test_what_one_peer_settled_while_most_stood_still_is_taken_up_and_no_work_is_lost(
    tmp_path, seconds, sharded
):
    notes = most_stand_still(tmp_path, seconds, sharded)
    sets, made = {}, set()
    for note in notes:
        if note.event == "settled":
            sets.setdefault(note.fields["round"], set()).add(frozenset(note.fields["ids"]))
        if note.event == "contribution_made" and note.name == "p2" and 15.0 <= note.time <= 15.0 + seconds:
            made.add(note.fields["id"])
    assert [round for round, found in sets.items() if len(found) > 1] == []
    assert {note.fields["code"] for note in notes if note.event == "resync"} <= {"behind"}
    # Where the reducers of a round stand still, it takes up to its deadline.
    assert len(made) >= (2 if sharded else 4), "who was awake went on"
    assert sharded or made <= {name for found in sets.values() for ids in found for name in ids}


def test_who_fell_silent_is_not_linked_again_before_it_says_something(tmp_path):
    async def story():
        world = World(manifest=small_manifest(1, 3, None, 6), seed=6, disk=tmp_path)
        for number in range(3):
            world.start(f"p{number}", 0)
        await asyncio.sleep(10.0)
        frozen = world.members["p1"]
        world.freeze(frozen)
        await asyncio.sleep(40.0)
        world.thaw(frozen)
        await asyncio.sleep(3.0)
        await world.close()
        return [
            (note.time, note.name, note.event) for note in world.journal.events
            if note.event in ("linked", "unlinked") and note.time > 10 and note.fields["peer"] == frozen.peer
        ]  # fmt: skip

    happened = gated(story)
    during = [(name, event) for at, name, event in happened if at < 50.0]
    assert sorted(during) == [("p0", "unlinked"), ("p2", "unlinked")]
    after = {(name, event) for at, name, event in happened if at > 50.0}
    assert after == {("p0", "linked"), ("p2", "linked")}
