"""The deterministic world: whole swarms under faults from seeds, and the checker that judges them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from peers.simulation.clock import GATE, Gate, GatedLoop, Spinning
from peers.simulation.faults import KINDS, schedule
from peers.simulation.invariants import check
from peers.simulation.play import Options, Seen, play
from peers.simulation.report import log_digest

FIRST_SEED, SCHEDULES = 3000, 12
"""Always the same ones: what a change breaks must be told from what was never seen before. New seeds are
played by `scripts/soak simulate`, which names those that fail; they belong into failing_seeds.txt."""
SWARMNET = (sys.executable, "-m", "peers.cli", "simulate")
PLACE = Path(__file__).parent


def failed_before() -> list[int]:
    lines = (PLACE / "failing_seeds.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWARMNET, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=PLACE.parent, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schedules_of_faults_violate_nothing():
    done = simulate("--seed", str(FIRST_SEED), "--schedules", str(SCHEDULES), "--jobs", "2")
    assert done.returncode == 0, f"add the seed to failing_seeds.txt:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("seed", failed_before())
def test_what_failed_once_holds_now(seed):
    assert check(play(Options(seed))) == []


@pytest.mark.timeout(300)
def test_a_seed_replays_the_same_run_whatever_the_order_of_sets():
    program = (
        "from peers.simulation.play import Options, play\n"
        "from peers.simulation.report import log_digest\n"
        "print(log_digest(play(Options(6, peers=8, stages=2, rounds=20))))"
    )
    found = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=PLACE.parent, capture_output=True, text=True, timeout=200,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert found == {log_digest(play(Options(6, peers=8, stages=2, rounds=20)))}


def test_every_kind_of_fault_is_drawn_and_a_seed_draws_the_same():
    names = [f"p{number}" for number in range(8)]
    drawn = {type(fault).__name__ for seed in range(100) for fault in schedule(seed, names, 50.0)}
    assert len(drawn) == len(KINDS)
    assert schedule(5, names, 50.0) == schedule(5, names, 50.0) != schedule(6, names, 50.0)
    assert {type(fault).__name__ for fault in schedule(5, names, 50.0, ["freeze"])} == {"Freeze"}


@pytest.fixture(scope="module")
def quiet() -> Seen:
    """A small world in which almost nothing goes wrong."""
    seen = play(Options(3, peers=4, stages=2, kinds=("slow",), rounds=20))
    assert check(seen) == []
    return seen


def tampered(seen: Seen, event: str, number: int, **fields: object) -> list[str]:
    """The rules that are violated if the log's `number`th such event (from behind) said something else."""
    places = [place for place, note in enumerate(seen.notes) if note.event == event]
    notes = list(seen.notes)
    place = places[-number]
    notes[place] = replace(notes[place], fields={**notes[place].fields, **fields})
    changed = replace_notes(seen, notes)
    return [violation.rule for violation in check(changed)]


def replace_notes(seen: Seen, notes: list) -> Seen:
    return replace(seen, notes=notes)


def settled(seen: Seen, number: int) -> dict:
    return [note for note in seen.notes if note.event == "settled"][-number].fields


def test_the_checker_finds_a_set_that_lacks_a_contribution_or_has_one_twice(quiet):
    number = next(n for n in range(30, 90) if len(settled(quiet, n)["ids"]) > 1)
    ids = settled(quiet, number)["ids"]
    assert "one digest, one set" in tampered(quiet, "settled", number, ids=ids[1:])
    everywhere = [
        replace(note, fields={**note.fields, "ids": note.fields["ids"][1:]})
        if note.event == "settled" and note.fields["ids"] == ids else note
        for note in quiet.notes
    ]  # fmt: skip
    rules = [violation.rule for violation in check(replace_notes(quiet, everywhere))]
    assert "settled weights are the sum of the settled sets" in rules


def test_the_checker_finds_another_digest(quiet):
    rules = tampered(quiet, "settled", 1, digest=b"\1" * 32)
    assert "settled weights are the sum of the settled sets" in rules


def test_the_checker_finds_a_contribution_that_vanished(quiet):
    made = next(note for note in quiet.notes if note.event == "made")
    lost = replace(made, fields={**made.fields, "id": b"\1" * 16})
    first = quiet.notes.index(made)
    notes = [*quiet.notes[: first + 1], lost, *quiet.notes[first + 1 :]]
    assert "nothing vanishes" in [violation.rule for violation in check(replace_notes(quiet, notes))]


def test_the_checker_finds_a_contribution_that_is_settled_and_came_back(quiet):
    payload = next(note for note in quiet.notes if note.event == "payload")
    notes = [*quiet.notes, replace(payload, event="returned")]
    assert "nothing settled twice" in [violation.rule for violation in check(replace_notes(quiet, notes))]


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


def test_the_command_says_what_happened_and_refuses_what_it_cannot_play(tmp_path):
    done = simulate(
        "--seed", "3", "--peers", "4", "--stages", "2", "--rounds", "10", "--kind", "slow",
        "--report", str(tmp_path / "report.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 schedules, 0 violated" in done.stdout
    assert '"violations": []' in (tmp_path / "report.json").read_text()
    refused = simulate("--peers", "3", "--stages", "2")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: 3 peers for 2 stages")
    assert simulate("--kind", "meteor").returncode == 2
