"""Pulling what others hold, on hand-set time: asked of one, then of the next, then given up."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import Reference, RequestContributions
from swarmnet.rounds.fetch_scheduler import MAX_ASKS, MAX_OF_ONE, MAX_PULLS, PULL_SECONDS, FetchScheduler

A, B, MAKER = PeerId("a"), PeerId("b"), PeerId("maker")


def reference(number: int, round: int = 0) -> Reference:
    return Reference(round, MAKER, ContributionId(number.to_bytes(16, "big")), 100)


ONE, TWO = reference(1), reference(2)


def test_what_is_offered_is_asked_for_once():
    pulls = FetchScheduler(PeerId("me"))
    assert pulls.offered(A, [ONE, TWO], 0.0) == [RequestContributions(A, (ONE.id, TWO.id))]
    assert pulls.offered(B, [ONE], 0.1) == []
    assert pulls.offered(A, [], 0.1) == []
    assert len(pulls) == 2
    assert pulls.of_round(0)
    assert not pulls.of_round(1)


def test_what_does_not_come_is_asked_of_the_next_holder_in_turn():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [ONE], 0.0)
    pulls.offered(B, [ONE], 0.1)
    assert pulls.next_deadline() == PULL_SECONDS
    assert pulls.again(0.9 * PULL_SECONDS) == []
    assert pulls.again(PULL_SECONDS) == [RequestContributions(B, (ONE.id,))]
    assert pulls.again(2 * PULL_SECONDS) == [RequestContributions(A, (ONE.id,))]
    pulls.arrived(ONE, A, 2.5)
    assert pulls.next_deadline() == float("inf")
    pulls.arrived(ONE, A, 3.0)


def test_when_the_asked_holder_leaves_the_next_is_asked_at_once():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [ONE, TWO], 0.0)
    pulls.offered(B, [ONE], 0.0)
    pulls.left(A, 0.5)
    assert len(pulls) == 1, "nobody else offered the other"
    assert pulls.again(0.5) == [RequestContributions(B, (ONE.id,))]


def test_settled_rounds_are_forgotten():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [reference(n, round=n) for n in range(5)], 0.0)
    pulls.forget_until(2, 1.0)
    assert [pulls.of_round(n) for n in range(5)] == [False, False, False, True, True]


def test_what_nobody_gives_is_given_up_and_may_be_offered_again():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [ONE], 0.0)
    now, asked = 0.0, 1
    while len(pulls):
        now = pulls.next_deadline()
        asked += len(pulls.again(now))
    assert asked == MAX_ASKS
    assert pulls.offered(A, [ONE], now) == [RequestContributions(A, (ONE.id,))]


def test_names_without_end_are_not_remembered():
    pulls = FetchScheduler(PeerId("me"))
    for number, start in enumerate(range(0, 3 * MAX_PULLS, 500)):
        pulls.offered(PeerId(f"liar {number}"), [reference(n) for n in range(start, start + 500)], 0.0)
    assert len(pulls) == MAX_PULLS


@pytest.mark.parametrize("at_once", [500, 3 * MAX_PULLS])
def test_names_of_one_neighbour_alone_leave_room_for_those_of_the_others(at_once):
    pulls = FetchScheduler(PeerId("me"))
    for start in range(0, 3 * MAX_PULLS, at_once):
        pulls.offered(A, [reference(n) for n in range(start, start + at_once)], 0.0)
    assert len(pulls) == MAX_OF_ONE
    true = reference(10**9)
    assert pulls.offered(B, [true], 0.0) == [RequestContributions(B, (true.id,))]


def test_a_round_waits_for_a_name_of_one_neighbour_alone_no_longer_than_for_its_first_answer():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [ONE], 0.0)
    assert pulls.of_round(0)
    assert pulls.again(PULL_SECONDS) == [RequestContributions(A, (ONE.id,))], "it is asked again all the same"
    assert not pulls.of_round(0)
    pulls.offered(B, [ONE], PULL_SECONDS + 0.1)
    assert pulls.of_round(0), "somebody else has it, too"
    pulls.arrived(ONE, B, 2.0)
    assert not pulls.of_round(0)


@given(st.integers(0, 2**32))
def test_whatever_an_honest_holder_offers_comes_in_the_end_though_messages_are_lost(seed):
    chance, pulls, now = Random(seed), FetchScheduler(PeerId("me")), 0.0
    wanted = {reference(n).id: reference(n) for n in range(10)}
    lost = 0.3
    for _ in range(1000):
        if not wanted:
            break
        if chance.random() < 0.2:
            pulls.offered(chance.choice([A, B]), [reference(99)], now)
            pulls.arrived(reference(99), B, now)
        offered = list(wanted.values()) if not len(pulls) else []
        for want in pulls.offered(A, offered, now) + pulls.again(now):
            for identity in want.ids:
                if identity in wanted and chance.random() > lost:
                    pulls.arrived(wanted.pop(identity), A, now)
        if len(pulls):
            assert pulls.next_deadline() > now, "it would spin"
            now = pulls.next_deadline()
    assert not wanted
    assert len(pulls) == 0
