"""When a schedule may end, and the command that repeats it."""

from __future__ import annotations

import pytest

from peers.lab.faults import fault_report
from peers.lab.faults.play import Options, forked_rounds
from peers.lab.world.journal import RecordedEvent
from peers.telemetry import log_events


@pytest.mark.parametrize(
    ("rounds_of_b", "forked"),
    [
        ([(1, "x"), (2, "y")], []),
        ([(1, "x"), (2, "other")], ["stage 0 is forked at round 2"]),
        ([(1, "x"), (2, "other"), (2, "y"), (3, "z")], []),  # It came back.
        ([(1, "other"), (3, "z")], []),  # It left that branch before.
    ],
)
def test_a_schedule_sees_a_fork_that_is_not_healed_yet(rounds_of_b, forked):
    settled = {"a": [(1, "x"), (2, "y")], "b": rounds_of_b, "dead": [(2, "w")], "elsewhere": [(2, "v")]}
    notes = [
        RecordedEvent(1.0, name, 0, log_events.Settled(round, digest, []))
        for name, rounds in settled.items()
        for round, digest in rounds
    ]
    assert forked_rounds(notes, {("a", 0): 0, ("b", 0): 0, ("elsewhere", 0): 1}) == forked


def test_the_command_that_repeats_a_schedule_names_what_differs_from_the_defaults():
    shorter = fault_report.again(Options(3, peers=2, stages=1, rounds=10, seconds=20.0), 4, None)
    assert shorter == "swarmnet simulate --seed 4 --peers 2 --stages 1 --rounds 10 --seconds 20"
    assert fault_report.again(Options(3), 3, None) == "swarmnet simulate --seed 3"
