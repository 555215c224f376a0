"""A stage whose peers all wait for weights: it has no capacity, and the peer that has them goes there."""

from random import Random

import pytest

from swarmnet.identifiers import PeerId
from swarmnet.placement.policy import (
    MoveRules,
    ObservedPeer,
    View,
    choose_move,
    choose_stage,
    summarize_records,
)
from swarmnet.placement.standstill import OnDisk, StagePeer, stage_to_restore, stuck_stages

RULES = MoveRules((1.0, 1.0, 1.0), rounds_from_seed=16)
ME = PeerId("me")


def waits(stage: int) -> ObservedPeer:
    return ObservedPeer(stage, 0.0, waits=True)


def trains(stage: int, round: int = 100, rate: float = 1.0) -> ObservedPeer:
    return ObservedPeer(stage, rate, round=round)


def view(*seen: ObservedPeer) -> View:
    return summarize_records(((PeerId(str(number)), one) for number, one in enumerate(seen)), RULES)


@pytest.mark.parametrize(
    ("peers", "stuck"),
    [
        ([(0, True, 0), (1, False, 100)], {0: 1}),
        ([(0, True, 0), (0, False, 100), (1, False, 100)], {}),
        ([(0, True, 0), (1, False, 15)], {}),
        ([(0, True, 0), (1, True, 0)], {}),
        ([(0, True, 0), (0, True, 0), (2, True, 0), (1, False, 16), (-1, True, 0)], {0: 2, 2: 1}),
    ],
    ids=["no weights there", "downloads", "a new run", "all begin", "two stages"],
)
def test_a_stage_is_stuck_where_all_peers_wait_for_weights_in_a_run_that_has_some(peers, stuck):
    assert stuck_stages([StagePeer(*peer) for peer in peers], 16) == stuck


def test_peers_that_wait_for_weights_are_no_capacity():
    there = [waits(0), waits(0), waits(0), trains(1), trains(2)]
    assert view(*there).capacities == (0.0, 1.0, 1.0)
    assert {choose_stage(view(*there), RULES, Random(seed)) for seed in range(9)} == {0}
    assert choose_stage(view(*there[:3], waits(1), trains(2)), RULES, Random(0)) == 1, "they spread"


def test_peers_of_a_new_run_count_as_ever():
    there = [waits(0), waits(0), waits(1), trains(2, round=3)]
    assert view(*there).capacities == (2.0, 1.0, 1.0)


def moved_to(on_disk: set[int], *seen: ObservedPeer) -> int | None:
    intent = choose_move(view(*seen), ME, 1, 1.0, RULES, 5.0, Random(1), on_disk=frozenset(on_disk))
    return intent.target if intent is not None else None


def test_to_a_stuck_stage_a_peer_moves_only_with_its_weights():
    stuck = [waits(0), waits(0), trains(1), trains(1), trains(2), trains(2)]
    assert moved_to({0}, *stuck) == 0
    assert moved_to({2}, *stuck) is None
    assert moved_to({0}, waits(0), trains(1), trains(2)) is None, "nobody would be left in its stage"
    assert moved_to({0}, waits(0), trains(0), trains(1), trains(1), trains(2)) is None, "it is not stuck"


@pytest.mark.parametrize(
    ("seen", "on_disk", "stage"),
    [
        ([waits(0), trains(1)], [(1, 90), (0, 100)], 0),
        ([trains(1)], [(1, 90), (0, 100)], 0),
        ([trains(0), trains(1)], [(1, 90), (0, 100)], None),
        ([trains(0), trains(1, round=80)], [(0, 100), (1, 90)], 1),
        ([waits(0), trains(1)], [(2, 50), (0, 100)], 0),
        ([], [(2, 50), (0, 100)], 2),
        ([waits(0), trains(1)], [], None),
    ],
    ids=["stuck", "empty", "all there", "older there", "stuck first", "last written first", "empty disk"],
)
def test_a_peer_goes_where_its_weights_are_missing(seen, on_disk, stage):
    held = [OnDisk(*one) for one in on_disk]
    assert stage_to_restore(seen, held) == stage
    assert stage_to_restore(seen, held, never={stage}) != stage or stage is None
