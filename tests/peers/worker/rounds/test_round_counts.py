"""How a round that is applied is counted, and whether people read of it."""

from types import SimpleNamespace

import pytest

from peers.telemetry.event import event_text
from peers.telemetry.log_events import Applied
from peers.worker.rounds.round_counts import RoundCounts
from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.events import ApplyRound

TIMEOUT, PEER = 5.0, PeerId("peer")


def outcome_of(contributors, waited, **neighbour):
    rounds = SimpleNamespace(
        neighbours={PEER: NeighbourView(**neighbour)} if neighbour else {},
        rules=SimpleNamespace(contribution_timeout_seconds=TIMEOUT),
        rounds={},
        history={},
    )
    effect = ApplyRound(7, (PEER,) * contributors, waited)
    return RoundCounts().applied(effect, contributors, rounds, 0.0)


@pytest.mark.parametrize(
    ("outcome", "contributors", "waited", "neighbour"),
    [
        ("completed", 2, 0.1, {"round": 8, "settled": 5}),
        ("deadline", 2, TIMEOUT, {"round": 8, "settled": 5}),
        ("replayed", 2, 0.1, {"round": 9, "settled": 7}),
        ("alone", 1, 0.1, {}),
        ("empty", 0, TIMEOUT, {"round": 8, "settled": 5}),
        ("empty", 0, 0.1, {"round": 7, "settled": 5}),
        ("replayed", 0, 0.1, {"round": 11, "settled": 5}),
    ],
)
def test_a_round_is_counted_by_how_it_ended(outcome, contributors, waited, neighbour):
    assert outcome_of(contributors, waited, **neighbour) == outcome


def test_a_newcomer_that_catches_up_prints_no_worry():
    code = outcome_of(0, 0.1, round=11, settled=5)
    assert event_text(Applied(round=7, code=code)) is None
