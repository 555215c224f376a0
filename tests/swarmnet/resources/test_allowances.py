"""What one sender may cost: a bucket of signature checks, unfinished bytes, and a pace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.membership.overlay import RINGS
from swarmnet.resources.allowances import (
    CHECKS_AT_ONCE,
    CHECKS_PER_SECOND,
    MAX_BUCKETS,
    PACE_BYTES,
    PACE_SECONDS,
    SMALLEST_SHARE_BYTES,
    SMALLEST_WHOLE_BYTES,
    AnswerBudget,
    Buckets,
    Checks,
    Pace,
    Unfinished,
)
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.run.schema import Rounds


def test_nobody_waits_before_the_bucket_is_empty_and_then_for_one_check():
    checks = Checks(per_second=50.0, at_once=100)
    checks.spend("a", 99, 0.0)
    assert checks.wait("a", 0.0) == 0.0
    checks.spend("a", 1, 0.0)
    assert checks.wait("a", 0.0) == pytest.approx(1 / 50)
    assert checks.wait("a", 0.03) == 0.0


def test_a_message_may_overdraw_and_is_paid_back_second_by_second():
    checks = Checks(per_second=50.0, at_once=100)
    checks.spend("a", 100 + 256, 0.0)
    assert checks.wait("a", 0.0) == pytest.approx(257 / 50)
    assert checks.wait("b", 0.0) == 0.0, "others have buckets of their own"
    checks.spend("a", 0, 10.0)
    assert checks.wait("a", 10.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 300)), max_size=60))
def test_over_any_time_a_peer_gets_its_rate_its_burst_and_one_message(asked):
    checks, now, spent = Checks(), 0.0, 0
    for pause, count in asked:
        now += pause
        if not checks.wait("a", now):
            checks.spend("a", count, now)
            spent += count
    assert spent <= CHECKS_AT_ONCE + CHECKS_PER_SECOND * now + 300


def test_the_buckets_of_many_keys_are_forgotten_when_they_are_full_again():
    checks = Checks()
    for number in range(3 * MAX_BUCKETS):
        checks.spend(f"key {number}", 1, float(number))
    assert len(checks._buckets) <= MAX_BUCKETS


def test_the_buckets_of_many_keys_are_bounded_though_none_is_full_and_who_overdrew_most_is_remembered():
    buckets = Buckets(per_second=1.0, at_once=100.0)
    buckets.spend("worst", 1000.0, 0.0)
    for number in range(3 * MAX_BUCKETS):
        buckets.spend(f"key {number}", 50.0, 0.0)
    assert len(buckets._buckets) <= MAX_BUCKETS
    assert buckets.level("worst", 0.0) == -900.0


def test_an_asker_is_answered_within_its_own_budget_and_that_of_its_network():
    budget = AnswerBudget(per_second=10.0, at_once=100.0)
    budget.spend("a", "198.51.100.0/24", 70, 0.0)
    assert budget.left("a", "198.51.100.0/24", 0.0) == 30
    assert budget.left("b", "198.51.100.0/24", 0.0) == 30, "keys are free, networks are not"
    assert budget.left("a", "203.0.113.0/24", 0.0) == 30
    assert budget.left("c", "203.0.113.0/24", 0.0) == 100
    budget.spend("b", "198.51.100.0/24", 50, 0.0)
    assert budget.left("a", "198.51.100.0/24", 1.0) == 0
    assert budget.left("a", "198.51.100.0/24", 9.0) == 70


def test_an_honest_neighbour_of_a_large_group_stays_within_its_checks():
    """100 peers, a round every 2 s; the newcomer has its state from this neighbour as well."""
    checks, peers, share = Checks(), 100, 100 // (2 * RINGS)
    greeting, records, statements, order = 2, 32, 256, 1
    checks.spend("neighbour", greeting + records + statements + order, 0.0)
    checks.spend("neighbour", share * kept_rounds(Rounds()), 0.0)
    assert checks.wait("neighbour", 0.0) == 0.0
    for round in range(1, 200):
        checks.spend("neighbour", peers // 2 if round % 10 == 0 else share, 2.0 * round)
        assert checks.wait("neighbour", 2.0 * round) == 0.0


def test_who_holds_more_than_its_share_is_cut_and_others_are_not():
    unfinished = Unfinished()
    assert unfinished.hold("a", 1, SMALLEST_SHARE_BYTES, 1000) == []
    assert unfinished.hold("b", 2, 1000, 1000) == []
    assert unfinished.hold("a", 3, 1, 1000) == [3], "the stream that passes the bound"
    unfinished.hold("a", 3, 0, 1000)
    unfinished.hold("a", 1, 0, 1000)
    assert (unfinished.total, unfinished.of("a")) == (1000, 0)


def test_where_all_hold_too_much_together_those_who_hold_most_are_cut():
    unfinished = Unfinished()
    streams = SMALLEST_WHOLE_BYTES // (SMALLEST_SHARE_BYTES - 1000)
    for number in range(streams):
        assert unfinished.hold(f"greedy {number}", number, SMALLEST_SHARE_BYTES - 1000, 10) == []
    unfinished.hold("greedy 1", 100, 500, 10)
    assert set(unfinished.hold("honest", 101, 16_000, 10)) == {1, 100}
    unfinished.hold("greedy 1", 1, 0, 10)
    assert unfinished.hold("honest", 101, 100_000, 10) == []


def test_long_bodies_of_a_run_make_the_bounds_wider():
    unfinished, longest = Unfinished(), 64 << 20
    for stream in range(3):  # An activation and a gradient, on a link and two subflows.
        assert unfinished.hold("a", stream, longest, longest) == []
    assert unfinished.hold("a", 4, longest + 1, longest) == [4]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 1 << 22)), max_size=50))
def test_what_is_counted_is_the_sum_of_what_is_held(holds):
    unfinished, held = Unfinished(), {}
    for peer, stream, count in holds:
        unfinished.hold(peer, stream, count, 1 << 20)
        held[peer, stream] = count
    assert unfinished.total == sum(held.values())
    assert {peer: unfinished.of(peer) for peer in "abc"} == {
        peer: sum(count for (who, _), count in held.items() if who == peer) for peer in "abc"
    }


def test_a_stream_with_nothing_unfinished_may_be_silent_for_ever():
    pace = Pace()
    pace.came(100, False, 0.0)
    assert pace.until == float("inf")


def test_a_body_must_come_at_a_pace_and_short_words_do_not_help_it():
    pace = Pace()
    pace.came(1, True, 0.0)
    for second in range(1, 30):
        pace.came(0, True, float(second))
    assert pace.until == PACE_SECONDS
    pace.came(PACE_BYTES - 1, True, 29.0)
    assert pace.until == PACE_SECONDS
    pace.came(1, True, 29.5)
    assert pace.until == 29.5 + PACE_SECONDS


def test_a_stream_that_shares_a_home_line_with_fifty_others_keeps_the_pace():
    """1 Mbit/s in pieces of 64 KiB that go round 50 streams; urgent messages take a tenth of them."""
    pace, piece_seconds = Pace(), 64 * 1024 / 125_000
    now = 0.0
    pace.came(1, True, now)
    for _ in range(100):
        now += 50 * piece_seconds / 0.9
        assert now < pace.until
        pace.came(64 * 1024, True, now)


def test_who_was_not_read_is_not_slow():
    pace = Pace()
    pace.came(1, True, 0.0)
    pace.paused(29.0)
    assert pace.until == 29.0 + PACE_SECONDS
