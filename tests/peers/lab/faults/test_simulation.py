"""The deterministic world: whole swarms under faults from seeds, and the checker that judges them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import typer
from typed import refused

from peers.cli import lab
from peers.lab.faults import fault_report, invariants
from peers.lab.faults.fault_report import log_digest
from peers.lab.faults.faults import Partition
from peers.lab.faults.invariants import check
from peers.lab.faults.moves import LostStage, Move
from peers.lab.faults.play import SHARDS, Options, ScheduleRecord, play, small_manifest
from peers.lab.faults.schedules import KINDS, schedule
from peers.lab.faults.trees import read, stages_of, with_processes
from peers.lab.world.gated_clock import GATE, Gate, GatedLoop, Spinning
from peers.lab.world.journal import RecordedEvent
from peers.lab.world.stub_stage import SLICE_BYTES
from peers.lab.world.world_events import Crashed, Payload, Returned
from peers.telemetry import log_events
from swarmnet.rounds.result_table import head_of, read_head
from swarmnet.run.schema import Sync

MOVED_SEED = 4
FIRST_SEED, SCHEDULES = 3000, 2
"""Always the same ones: what a change breaks must be told from what was never seen before. New seeds are
played by `scripts/test` and `scripts/soak simulate`; those that fail belong into failing_seeds.txt."""
WITH_MOVES = (14, 15, 205)
"""Cheap ones. In the first a stage is lost, and peers come to it by their own decision."""
SHARDED = (4, 7, 10)
"""Small ones, with partitions, crashes and peers that stand still."""
SWARMNET = (sys.executable, "-m", "peers.cli.main", "simulate")
LONG_TOO = os.environ.get("SWARMNET_FAILED") == "all"
"""As `scripts/soak failed` sets it."""
PLACE = Path(__file__).parent
ROOT = PLACE.parents[3]


def failed_before() -> list[Options]:
    lines = (PLACE / "failing_seeds.txt").read_text().splitlines()
    seeds = [line.split() for line in lines if line and not line.startswith("#")]
    return [options_of(words) for words in seeds if LONG_TOO or "--long" not in words]


def options_of(words: list[str]) -> Options:
    numbers = {
        name: int(words[words.index(f"--{name}") + 1])
        for name in ("peers", "stages", "rounds")
        if f"--{name}" in words
    }
    return Options(
        int(words[0]), **numbers, moves="--moves" in words, sharded="--sharded" in words,
    )  # fmt: skip


def again(options: Options) -> str:
    flags = " --moves" * options.moves + " --sharded" * options.sharded
    return f"{options.seed}{flags}" + f" --stages {options.stages}" * (options.stages is not None)


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWARMNET, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_a_method_is_named_where_it_learns_and_a_schedule_is_played_by_it(swarmnet):
    assert small_manifest(2, 4, None, 1, sync=Sync(method="hybrid")).sync.method == "hybrid"
    refused(swarmnet("simulate", "--method", "hybrid"), "needs a model; add --real")


@pytest.mark.parametrize("typed", [None, "diloco"])
def test_real_peers_have_the_sync_section_of_the_run_file(typed, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(fault_report, "played", lambda options, jobs: asked.extend(options) or [])
    run_file = tmp_path / "run.yaml"
    run_file.write_text("name: a\nsync: {method: local-steps, residual: drop, outer_lr: 1.4}\n")
    with pytest.raises(typer.Exit):
        lab.simulate(run_file, real=True, method=typed)
    (options,) = asked
    assert options.sync == Sync(method=typed or "local-steps", residual="drop", outer_lr=1.4)
    assert f"--method {options.sync.method} --real" in fault_report.again(options, 1, run_file)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_schedules_of_faults_violate_nothing():
    size = ("--peers", "8", "--stages", "2")
    done = simulate("--seed", str(FIRST_SEED), "--schedules", str(SCHEDULES), "--jobs", "2", *size)
    assert done.returncode == 0, f"add the seed to failing_seeds.txt:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("options", failed_before(), ids=again)
def test_what_failed_once_holds_now(options):
    assert check(play(options)) == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", WITH_MOVES)
def test_schedules_in_which_peers_move_violate_nothing(seed):
    assert check(play(Options(seed, moves=True))) == []


def test_a_stage_other_than_the_first_that_is_lost_for_ever_begins_again_from_the_seed():
    seen = play(Options(7010, moves=True, kinds=("lost stage",), rounds=12))
    assert [note.fields["stage"] for note in seen.notes if note.event == "stage_lost"] == [1]
    assert check(seen) == []
    assert not seen.given_up, "who comes later asks those who train there again"


@pytest.mark.soak
@pytest.mark.parametrize("seed", SHARDED)
def test_schedules_in_which_peers_exchange_through_reducers_violate_nothing(seed):
    seen = play(Options(seed, peers=6, stages=2, rounds=20, sharded=True))
    assert check(seen) == []
    come_back_whole_and_in_parts(seen)


def test_peers_that_only_reduce_take_part_in_schedules_and_violate_nothing():
    seen = play(Options(9, peers=4, stages=2, rounds=10, seconds=30.0, sharded=True, helpers=2))
    assert check(seen) == []
    reduced = {note.name for note in seen.notes if note.event == "reduced"}
    made = {note.name for note in seen.notes if note.event == "contribution_made"}
    assert reduced & {"h0", "h1"}
    assert not made & {"h0", "h1"}


def test_peers_exchange_through_reducers_and_violate_nothing(sharded):
    come_back_whole_and_in_parts(sharded)


def come_back_whole_and_in_parts(seen):
    shards = {note.fields["shards"] for note in seen.notes if note.event == "returned"}
    came_back = {len(found) for found in shards}
    assert max(came_back) == SHARDS > min(came_back)
    reduced = [note for note in seen.notes if note.event == "reduced"]
    assert {note.fields["contributors"] for note in reduced} >= {1, 2, 3}


@pytest.mark.timeout(300)
def test_a_seed_replays_the_same_run_whatever_the_order_of_sets():
    program = (
        "from peers.lab.faults.play import Options, play\n"
        "from peers.lab.faults.fault_report import log_digest\n"
        "print(log_digest(play(Options(6, peers=4, stages=2, rounds=8, seconds=15.0))))"
    )
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONHASHSEED": other, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == log_digest(play(Options(6, peers=4, stages=2, rounds=8, seconds=15.0)))


def test_every_kind_of_fault_is_drawn_and_a_seed_draws_the_same():
    names = [f"p{number}" for number in range(8)]
    drawn = {type(fault).__name__ for seed in range(100) for fault in schedule(seed, names, 50.0)}
    assert len(drawn - {"NewcomerFinds"}) == len(KINDS)
    assert schedule(5, names, 50.0) == schedule(5, names, 50.0) != schedule(6, names, 50.0)
    assert {type(fault).__name__ for fault in schedule(5, names, 50.0, ["freeze"])} == {"Freeze"}


def test_moves_are_drawn_only_when_they_are_asked_for_and_change_no_other_fault():
    names = [f"p{number}" for number in range(8)]
    for seed in range(30):
        with_moves, before = schedule(seed, names, 50.0, moves=True), schedule(seed, names, 50.0)
        assert not [fault for fault in before if isinstance(fault, Move | LostStage)]
        assert any(isinstance(fault, Move) for fault in with_moves)
        assert [fault for fault in with_moves if fault in before] == before
    assert {type(fault) for fault in schedule(5, names, 50.0, ["lost stage"])} == {LostStage}


@pytest.fixture(scope="module")
def quiet() -> ScheduleRecord:
    """A small world in which almost nothing goes wrong."""
    seen = play(Options(3, peers=4, stages=2, kinds=("slow",), rounds=20, seconds=20.0))
    assert check(seen) == []
    return seen


@pytest.fixture(scope="module")
def restarted() -> ScheduleRecord:
    """A small world one of whose stages is killed and comes back."""
    return play(Options(1, peers=4, stages=2, kinds=("restart",), rounds=20))


def tampered(seen: ScheduleRecord, event: str, number: int, **fields: object) -> list[str]:
    """The rules that are violated if the log's `number`th such event (from behind) said something else."""
    places = [place for place, note in enumerate(seen.notes) if note.event == event]
    notes = list(seen.notes)
    place = places[-number]
    notes[place] = saying(notes[place], **fields)
    changed = replace_notes(seen, notes)
    return [violation.rule for violation in check(changed)]


def saying(note: RecordedEvent, **fields: object) -> RecordedEvent:
    """The same line with other fields."""
    return replace(note, what=msgspec.structs.replace(note.what, **fields))


def replace_notes(seen: ScheduleRecord, notes: list) -> ScheduleRecord:
    return replace(seen, notes=notes)


def settled(seen: ScheduleRecord, number: int) -> dict:
    return [note for note in seen.notes if note.event == "settled"][-number].fields


def test_the_checker_finds_a_set_that_lacks_a_contribution_or_has_one_twice(quiet):
    number = next(n for n in range(30, 90) if len(settled(quiet, n)["ids"]) > 1)
    ids = settled(quiet, number)["ids"]
    assert "one digest, one set" in tampered(quiet, "settled", number, ids=ids[1:])
    everywhere = [
        saying(note, ids=note.fields["ids"][1:])
        if note.event == "settled" and note.fields["ids"] == ids else note
        for note in quiet.notes
    ]  # fmt: skip
    rules = [violation.rule for violation in check(replace_notes(quiet, everywhere))]
    assert "settled weights are the sum of the settled sets" in rules


def test_the_checker_finds_another_digest(quiet):
    rules = tampered(quiet, "settled", 1, digest="01" * 32)
    assert "settled weights are the sum of the settled sets" in rules


def test_the_checker_finds_a_contribution_that_vanished(quiet):
    made = next(note for note in quiet.notes if note.event == "contribution_made")
    lost, payload = saying(made, id="01" * 16), Payload(made.what.round, b"nobody has it")
    first = quiet.notes.index(made)
    more = [replace(made, what=payload), lost]
    notes = [*quiet.notes[: first + 1], *more, *quiet.notes[first + 1 :]]
    assert "nothing vanishes" in [violation.rule for violation in check(replace_notes(quiet, notes))]
    given_back = log_events.ContributionReturned("contribution_returned", lost.what.round, lost.what.id)
    now = replace(lost, what=given_back, time=quiet.ended_at - 0.1)
    assert check(replace_notes(quiet, [*notes, now])) == [], "the compute thread will come to it"


def test_the_checker_finds_a_contribution_that_is_settled_and_came_back(quiet):
    payload = next(note for note in quiet.notes if note.event == "payload")
    returned = replace(payload, what=Returned(payload.what.round, payload.what.payload))
    notes = [*quiet.notes, returned]
    assert "nothing settled twice" in [violation.rule for violation in check(replace_notes(quiet, notes))]


@pytest.fixture(scope="module")
def sharded() -> ScheduleRecord:
    """A small world with reducers, of which some stand still, so that parts of contributions come back."""
    seen = play(Options(10, peers=6, stages=2, rounds=20, sharded=True))
    assert check(seen) == []
    return seen


def rules_of(seen: ScheduleRecord, notes: list) -> set[str]:
    return {violation.rule for violation in check(replace_notes(seen, notes))}


def test_the_checker_finds_a_slice_that_came_back_twice_or_not_at_all(sharded):
    place = next(
        place for place, note in enumerate(sharded.notes)
        if note.event == "returned" and len(note.fields["shards"]) == 1
        and f"{note.name}.{note.life}" in sharded.living
    )  # fmt: skip
    notes = sharded.notes
    assert rules_of(sharded, [*notes[:place], notes[place], *notes[place:]]) == {"nothing offered twice"}
    found = check(replace_notes(sharded, [*notes[:place], *notes[place + 1 :]]))
    assert [violation.rule for violation in found] == ["nothing vanishes"]
    assert f"shard {notes[place].fields['shards'][0]} " in found[0].text


def test_the_checker_finds_a_slice_that_is_settled_and_came_back(sharded):
    gone = {note.fields["payload"] for note in sharded.notes if note.event == "returned"}
    payload = next(
        note for note in sharded.notes if note.event == "payload" and note.fields["payload"] not in gone
    )
    back = replace(payload, what=Returned(payload.what.round, payload.what.payload, (1,)))
    found = check(replace_notes(sharded, [*sharded.notes, back]))
    assert [violation.rule for violation in found] == ["nothing settled twice"]
    assert "shard 1 is settled and came back" in found[0].text


def test_the_checker_finds_a_slice_that_is_settled_twice_or_in_no_round(sharded, monkeypatch):
    for times, rule in ((2, "nothing settled twice"), (0, "nothing vanishes")):
        stages, problems = read(sharded)
        stage = stages[0]
        path = invariants._path(stage, max(key for _, key in stage.settled[next(
            me for me, held in sharded.living.items() if held == 0
        )]))  # fmt: skip
        lives = {made.payload for made in stage.made.values() if made.who in sharded.living}
        node, part = next(
            (node, part)
            for round, node in ((round, stage.nodes[path[round]]) for round in sorted(path))
            for part in node.parts
            if part[:-1] in lives
        )
        node.parts = tuple(one for one in node.parts if one != part) + (part,) * times
        monkeypatch.setattr(invariants, "read", lambda seen, tree=(stages, problems): tree)
        assert [violation.rule for violation in check(sharded)] == [rule]
        monkeypatch.undo()


def test_the_checker_finds_a_result_that_adds_up_something_else(sharded):
    names = {name for note in sharded.notes if note.event == "settled" for name in note.fields["ids"]}
    reduced = next(note for note in sharded.notes if note.event == "reduced" and note.fields["id"] in names)
    place = next(
        place for place, note in enumerate(sharded.notes)
        if note.event == "summed" and note.name == reduced.name and note.life == reduced.life
        and note.fields["round"] == reduced.fields["round"]
    )  # fmt: skip
    summed = sharded.notes[place]
    table, start = read_head(summed.fields["payload"], sharded.reduced.draw.shards)
    sums = bytearray(summed.fields["payload"][start:])
    sums[SLICE_BYTES - 2] ^= 1
    wrong = saying(summed, payload=head_of(table, bytes(sums)) + sums)
    rules = rules_of(sharded, [*sharded.notes[:place], wrong, *sharded.notes[place + 1 :]])
    assert "settled weights are the sum of the settled sets" in rules


def test_the_checker_finds_that_what_all_held_was_left_out_though_its_maker_is_gone(quiet):
    last = [note for note in quiet.notes if note.event == "settled"][-9]
    stage = quiet.living[f"{last.name}.{last.life}"]
    round, holders = last.fields["round"], [me for me, held in quiet.living.items() if held == stage]
    gone = [
        replace(last, time=0.0, name="gone", what=event)
        for event in (
            log_events.Assembled(stage),
            Payload(round, b"votes"),
            log_events.ContributionMade(round, "01" * 16),
        )
    ]
    names = [me.partition(".")[0] for me in holders]
    taken = [
        replace(last, time=0.0, name=name, what=log_events.ContributionAccepted(round, "01" * 16, "gone"))
        for name in names
    ]
    start = max(place for place, note in enumerate(quiet.notes) if note.event == "assembled") + 1
    notes = [*quiet.notes[:start], *gone, *taken, *quiet.notes[start:]]
    rules = [violation.rule for violation in check(replace_notes(quiet, notes))]
    assert rules == ["what everybody held is settled"]
    one_less = [note for note in notes if note is not taken[0]]
    assert check(replace_notes(quiet, one_less)) == [], "somebody may have settled without knowing of it"


def test_a_stage_that_is_killed_as_a_whole_goes_on_from_its_disks(restarted):
    killed = next(note for note in restarted.notes if note.event == "stage_killed")
    names = {me.partition(".")[0] for me in killed.fields["lives"]}
    first = {
        note.name: note.fields["round"]
        for note in reversed(restarted.notes)
        if note.event == "settled" and note.name in names and note.time > killed.time
    }
    assert first.keys() == names
    assert min(first.values()) > 0, "not from the seed"
    assert check(restarted) == []


def test_the_checker_finds_a_stage_that_forgot_what_its_disks_hold(restarted):
    place = next(place for place, note in enumerate(restarted.notes) if note.event == "stage_killed")
    killed, before = restarted.notes[place], restarted.notes[:place]
    newest = {
        f"{note.name}.{note.life}": note
        for note in before
        if note.event == "settled" and f"{note.name}.{note.life}" in killed.fields["lives"]
    }
    round = min(note.fields["round"] for note in newest.values())
    saved = [replace(note, what=log_events.Saved(round, 1)) for note in newest.values()]
    notes = [*before, *saved, *restarted.notes[place:]]
    rules = [violation.rule for violation in check(replace_notes(restarted, notes))]
    assert rules == ["no settled round is lost"]


@pytest.fixture(scope="module")
def moved() -> ScheduleRecord:
    """A small world in which peers are ordered to other stages, and others go by their own decision."""
    seen = play(Options(MOVED_SEED, peers=6, stages=2, kinds=("move",), rounds=20, moves=True))
    assert check(seen) == []
    return seen


def moves_of(seen: ScheduleRecord) -> list[RecordedEvent]:
    return [note for note in seen.notes if note.event == "said" and note.fields["what"] == "moves"]


def test_a_peer_that_moved_works_in_its_new_stage_and_what_it_made_stays_in_the_old_one(moved):
    stage_of = stages_of(moved.notes)
    movers = [who for who in stage_of if "+" in who]
    assert moves_of(moved)
    assert len(movers) > len(moves_of(moved)), "others were ordered"
    stayed = [who for who in movers if who in moved.living]
    assert stayed
    for who in stayed:
        of = [note.event for me, note in with_processes(moved.notes) if me == who]
        assert "committed" in of
        assert "contribution_made" in of
    stages, problems = read(moved)
    assert problems == []
    for who, stage in stage_of.items():
        elsewhere = [made for other, held in stages.items() if other != stage for made in held.made.values()]
        assert who not in {made.who for made in elsewhere}


def test_the_checker_finds_a_contribution_of_the_old_stage_in_the_new_one(moved):
    stage_of, stages = stages_of(moved.notes), read(moved)[0]
    mover = next(who for who in stage_of if who.endswith("+1"))
    old = next(made.id for made in stages[stage_of[mover[:-2]]].made.values() if made.who == mover[:-2])
    digest = next(
        note.fields["digest"] for who, note in with_processes(moved.notes)
        if note.event == "settled" and stage_of[who] == stage_of[mover]
    )  # fmt: skip
    notes = [
        saying(note, ids=[*note.fields["ids"], old])
        if note.event == "settled" and note.fields["digest"] == digest else note
        for note in moved.notes
    ]  # fmt: skip
    assert "only what was made is settled" in [v.rule for v in check(replace_notes(moved, notes))]


def test_the_checker_finds_a_stage_that_a_move_emptied(moved):
    move, stage_of = moves_of(moved)[0], stages_of(moved.notes)
    mover, left = next((who, stage_of[who]) for who, note in with_processes(moved.notes) if note is move)
    others = [
        note for who, note in with_processes(moved.notes)
        if note.event == "in_step" and stage_of[who] == left and note.name != move.name
    ]  # fmt: skip
    notes = [note for note in moved.notes if not any(note is other for other in others)]
    assert [v.rule for v in check(replace_notes(moved, notes))] == ["a stage is never emptied by a move"]
    gone = replace(others[0], what=Crashed(), time=move.time - 3.0)
    place = moved.notes.index(move)
    crashes = [replace(gone, name=other.name) for other in others]
    killed = [*moved.notes[:place], *crashes, *moved.notes[place:]]
    emptied = [violation.text for violation in check(replace_notes(moved, killed))]
    assert not any(text.startswith(f"{mover} left") for text in emptied), "it could not know of the kills"


@pytest.mark.parametrize(
    "cut", [pytest.param(4, marks=pytest.mark.soak), 5], ids=["half and half", "five and three"]
)
def test_a_swarm_that_was_in_two_for_half_a_minute_is_on_one_history_20_s_later(cut):
    names = tuple(f"p{number}" for number in (0, 1, 4, 5, 2, 3, 6, 7))
    parted = Partition(10.0, 40.0, (names[:cut], names[cut:]))
    seen = play(Options(1, peers=8, stages=2, faults=(parted,), rounds=60))
    assert check(seen) == [], "and what the side that gave way had made is settled or came back"
    parted_then = {
        (note.name, note.fields["round"]): note.fields["digest"]
        for note in seen.notes
        if note.event == "settled" and note.time < parted.until
    }
    assert any(parted_then["p0", round] != digest for (name, round), digest in parted_then.items()
               if name == "p6" and ("p0", round) in parted_then), "there were two"  # fmt: skip
    for stage in (0, 1):
        digests: dict[int, set[bytes]] = {}
        for note in seen.notes:
            late = note.event == "settled" and note.time > parted.until + 20.0
            if late and seen.living[f"{note.name}.{note.life}"] == stage:
                digests.setdefault(note.fields["round"], set()).add(note.fields["digest"])
        assert digests
        assert all(len(found) == 1 for found in digests.values())


def test_schedules_hold_with_a_real_model_too():
    seen = play(Options(2, peers=4, stages=2, real=True, rounds=20, seconds=25.0))
    assert check(seen) == []
    settled = [note for note in seen.notes if note.event == "settled"]
    wrong = saying(settled[-9], digest="01" * 32)
    notes = [wrong if note is settled[-9] else note for note in seen.notes]
    rules = {violation.rule for violation in check(replace(seen, notes=notes, healed_at=-100.0))}
    assert rules == {"one digest soon after the last heal"}


@pytest.mark.parametrize("sharded", [False, True], ids=["all-gather", "sharded-reduce"])
def test_schedules_hold_with_votes_on_polar_factors(sharded):
    sync = Sync(method="sign-muon")
    options = Options(2, peers=4, stages=2, real=True, rounds=20, sync=sync, sharded=sharded, seconds=25.0)
    assert check(play(options)) == []


@pytest.mark.soak  # Seven peers, because all weigh the same below five: 20 s of a core each.
@pytest.mark.parametrize("sharded", [False, True], ids=["all-gather", "sharded-reduce"])
def test_schedules_hold_with_weights_by_agreement(sharded):
    sync = Sync(method="sign-muon", weights="agreement")
    options = Options(2, peers=7, stages=1, real=True, rounds=25, sync=sync, sharded=sharded, seconds=25.0)
    assert check(play(options)) == []


@pytest.mark.parametrize("sharded", [False, True], ids=["all-gather", "sharded-reduce"])
def test_schedules_hold_with_an_outer_rate_and_without_a_residual(sharded):
    sync = Sync(method="local-steps", residual="drop", outer_lr=1.4)
    options = Options(2, peers=4, stages=2, real=True, rounds=20, sync=sync, sharded=sharded, seconds=25.0)
    assert check(play(options)) == []


@pytest.mark.parametrize(
    "sharded", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["all-gather", "sharded-reduce"]
)
def test_schedules_hold_where_each_peer_trains_half_of_the_experts(sharded):
    options = Options(2, peers=4, stages=2, real=True, rounds=20, experts=True, sharded=sharded, seconds=25.0)
    seen = play(options)
    assert check(seen) == []
    notes = [saying(note, group=0) if note.event == "experts_reassigned" else note for note in seen.notes]
    rules = {violation.rule for violation in check(replace(seen, notes=notes))}
    assert rules == {"every expert is trained in the end"}


def test_the_checker_finds_a_microbatch_committed_twice(quiet):
    committed = next(note for note in quiet.notes if note.event == "committed")
    rules = [violation.rule for violation in check(replace_notes(quiet, [*quiet.notes, committed]))]
    assert rules == ["a microbatch is committed once per peer"]


def test_a_peer_that_stands_still_does_so_with_all_its_timers_and_goes_on_where_it_was():
    seen = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        gate, context = Gate(), contextvars.copy_context()
        context.run(GATE.set, gate)

        async def ticks() -> None:
            for number in range(6):
                await asyncio.sleep(1.0)
                seen.append((number, loop.time()))

        task = loop.create_task(ticks(), context=context)
        cancelled = loop.call_later(3.2, seen.append, "never", context=context)
        await asyncio.sleep(2.5)
        gate.shut = True
        await asyncio.sleep(10.0)
        cancelled.cancel()
        gate.open()
        await task

    with asyncio.Runner(loop_factory=GatedLoop) as runner:
        runner.run(main())
    assert seen == [(0, 1.0), (1, 2.0), (2, 12.5), (3, 13.5), (4, 14.5), (5, 15.5)]


def test_callbacks_that_go_on_for_ever_at_one_instant_are_an_error():
    def again() -> None:
        asyncio.get_running_loop().call_soon(again)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        found = loop.create_future()
        loop.set_exception_handler(lambda _, context: found.set_result(context["exception"]))
        again()
        raise await found

    with asyncio.Runner(loop_factory=GatedLoop) as runner, pytest.raises(Spinning):
        runner.run(main())


def test_the_command_says_what_happened(tmp_path):
    done = simulate(
        "--seed", "3", "--peers", "2", "--stages", "1", "--rounds", "10", "--kind", "slow",
        "--report", str(tmp_path / "report.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 schedules, 0 violated" in done.stdout
    assert '"violations": []' in (tmp_path / "report.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--peers 3 --stages 2", "error: 3 peers for 2 stages"),
        ("--kind meteor", "meteor"),
        ("--kind lost_stage", "add it"),
        ("--method diloco", "add --real"),
        ("--experts", "needs --real"),
    ],
)
def test_the_command_refuses_what_it_cannot_play(swarmnet, arguments, reason):
    refused(swarmnet("simulate", *(word.replace("_", " ") for word in arguments.split())), reason)
