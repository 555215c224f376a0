"""Whom the next microbatch goes to: a virtual-time queue, charged by what the peers tell of themselves."""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.routing.load_balancer import (
    BUSY_SECONDS,
    CATCH_UP,
    FIRST_BACK_OFF_SECONDS,
    FIRST_SLOTS,
    LONGEST_BACK_OFF_SECONDS,
    LONGEST_BUSY_SECONDS,
    MAX_SLOTS,
    Router,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def told(seed: int = 1, **seconds: float) -> Router:
    """A router whose peers have said how long a microbatch keeps them busy."""
    router = Router(Random(seed))
    for peer, compute in seconds.items():
        meet(router, PeerId(peer), compute)
    return router


def meet(router: Router, peer: PeerId, compute: float, slots: int = 32, waiting: int = 0) -> None:
    router.choose([peer], 0.0)
    router.on_credit(peer, slots, compute, waiting)


def send(router: Router, peers: list[PeerId], count: int) -> Counter[PeerId]:
    """Send and get back so many, one at a time."""
    done: Counter[PeerId] = Counter()
    for _ in range(count):
        peer = router.choose(peers, 0.0)
        assert peer is not None
        router.sent(peer)
        router.ended(peer)
        done[peer] += 1
    return done


def test_work_is_shared_in_proportion_to_speed():
    done = send(told(a=0.1, b=0.3), [A, B], 400)
    assert 2.8 < done[A] / done[B] < 3.2


def test_a_distant_peer_gets_as_much_as_a_near_one_that_computes_as_fast():
    router, done, now = told(a=0.1, b=0.1), Counter(), 0.0
    away = {A: 0.01, B: 0.4}
    free_at, coming = {A: 0.0, B: 0.0}, []
    for _ in range(600):
        while len(coming) < 12 and (peer := router.choose([A, B], now)) is not None:
            router.sent(peer)
            free_at[peer] = max(now + away[peer] / 2, free_at[peer]) + 0.1
            heapq.heappush(coming, (free_at[peer] + away[peer] / 2, now, peer))
        now, sent_at, peer = heapq.heappop(coming)
        router.ended(peer)
        router.answered(peer, now - sent_at)
        done[peer] += 1
    assert 0.9 < done[A] / done[B] < 1.1
    assert router.expected_seconds(B) > router.expected_seconds(A)


def test_a_peer_where_much_waits_gets_less():
    router = told(a=0.1, b=0.1)
    for _ in range(60):
        router.on_credit(B, 32, 0.1, 3)
    done = send(router, [A, B], 500)
    assert 3.5 < done[A] / done[B] < 4.5


def test_equals_are_drawn_by_chance_and_the_slower_is_not_first():
    firsts = Counter(told(seed, a=0.1, b=0.101, c=0.2).choose([A, B, C], 0.0) for seed in range(300))
    assert firsts[C] == 0
    assert min(firsts[A], firsts[B]) > 100


def test_a_peer_that_told_nothing_is_tried_at_once_and_counts_as_good_as_the_best():
    router = told(a=0.1, b=0.4)
    send(router, [A, B], 100)
    done = send(router, [A, B, C], 90)
    assert abs(done[C] - done[A]) <= 2
    assert done[B] < done[C] / 3


def test_a_peer_that_was_away_gets_no_more_than_a_few_at_once():
    router = told(a=0.1, b=0.1)
    send(router, [A], 500)
    following = [next(iter(send(router, [A, B], 1))) for _ in range(30)]
    assert following[: int(CATCH_UP)].count(B) >= CATCH_UP - 1
    assert following.count(B) <= 15 + CATCH_UP


def test_full_peers_and_those_to_avoid_are_left_out_but_the_avoided_are_better_than_none():
    router = told(a=0.1, b=1.0)
    router.on_credit(B, 4, 1.0, 0)
    assert router.choose([A, B], 0.0, avoid={A}) == B
    assert router.choose([A], 0.0, avoid={A}) == A
    for _ in range(4):
        router.sent(B)
    assert router.choose([B], 0.0) is None
    assert not router.has_room([B], 0.0)
    assert router.has_room([A, B], 0.0)
    assert router.choose([A, B], 0.0, avoid={A}) == A
    assert router.choose([], 0.0) is None


def test_credit_counts_from_those_that_were_sent_something_and_within_bounds():
    router = Router(Random(1))
    router.on_credit(A, 9, 0.1, 0)
    assert not router.peers
    for _ in range(FIRST_SLOTS):
        assert router.choose([A], 0.0) == A
        router.sent(A)
    assert router.choose([A], 0.0) is None
    router.answered(A, 0.2)
    assert router.choose([A], 0.0) is None, "it takes no more"
    router.on_credit(A, FIRST_SLOTS + 1, 0.0, 2**60)
    assert router.choose([A], 0.0) == A
    assert router.peers[A].compute_seconds is None
    router.on_credit(A, 2**60, 0.5, 0)
    assert router.peers[A].slots == MAX_SLOTS
    assert router.peers[A].waiting < MAX_SLOTS


def test_whoever_promises_much_is_sent_no_more_than_it_has_earned():
    """By answers: a peer that swallows what it is sent costs one microbatch at a time."""
    router = Router(Random(1))
    meet(router, A, 1e-9, slots=MAX_SLOTS)
    meet(router, B, 0.1)

    def filled(now: float = 0.0) -> int:
        sent = 0
        while router.choose([A], now) == A:
            router.sent(A)
            sent += 1
        for _ in range(sent):
            router.ended(A)
        return sent

    assert filled() == FIRST_SLOTS
    for answers in range(1, 9):
        router.answered(A, 0.2)
        assert filled() == FIRST_SLOTS + answers
    for _ in range(9):
        router.failed(A, 100.0)
    assert filled(200.0) == 5, "half of nine, begun: one failure, however many it meets"
    for _ in range(100):
        router.sent(A)
        router.ended(A)
        router.answered(A, 0.2)
    assert filled(200.0) == 6, "one at a time earns no more than one"
    for _ in range(2 * MAX_SLOTS):
        while router.choose([A], 200.0) == A:  # What is in flight stays there.
            router.sent(A)
        router.ended(A)
        router.answered(A, 0.2)
    while router.choose([A], 200.0) == A:
        router.sent(A)
    assert router.peers[A].in_flight == MAX_SLOTS


def test_a_peer_that_fails_is_left_alone_for_a_while_that_doubles_until_it_answers():
    router, now, pauses = told(a=0.1), 0.0, []
    for _ in range(8):
        router.failed(A, now)
        pauses.append(router.peers[A].blocked_until - now)
        assert router.choose([A], now) is None
        now = router.peers[A].blocked_until
        assert router.choose([A], now) == A
    assert 0.8 * FIRST_BACK_OFF_SECONDS <= pauses[0] <= 1.2 * FIRST_BACK_OFF_SECONDS
    assert pauses[1] > 1.3 * pauses[0]
    assert max(pauses) <= 1.2 * LONGEST_BACK_OFF_SECONDS
    router.answered(A, 0.2)
    router.failed(A, now)
    assert router.peers[A].blocked_until - now <= 1.2 * FIRST_BACK_OFF_SECONDS


def test_busy_is_a_short_pause_that_doubles_and_no_failure():
    router = told(a=0.1)
    router.busy(A, 5.0)
    assert router.choose([A], 5.0 + 0.9 * BUSY_SECONDS) is None
    assert router.choose([A], 5.0 + 1.1 * BUSY_SECONDS) == A
    assert router.peers[A].failures == 0
    for _ in range(20):
        router.busy(A, 6.0)
    assert router.peers[A].blocked_until == 6.0 + LONGEST_BUSY_SECONDS
    router.answered(A, 0.2)
    router.busy(A, 9.0)
    assert router.peers[A].blocked_until == 9.0 + BUSY_SECONDS


def test_busy_does_not_end_the_longer_pause_of_a_failure():
    router = told(a=0.1)
    router.failed(A, 5.0)
    router.busy(A, 5.0)
    assert not router.is_usable(A, 5.0 + 0.7 * FIRST_BACK_OFF_SECONDS)
    assert router.is_usable(A, 5.0 + 1.3 * FIRST_BACK_OFF_SECONDS)


def test_one_failure_counts_once_however_many_microbatches_it_meets():
    router = told(a=0.1)
    for _ in range(8):
        router.failed(A, 5.0)
    assert router.peers[A].failures == 1
    assert router.is_usable(A, 5.0 + 1.3 * FIRST_BACK_OFF_SECONDS)


def test_what_may_be_promised_is_what_was_earned_whatever_a_peer_says():
    router = told(a=0.1)
    assert router.has_earned(A, 0, 0.0)
    assert not router.has_earned(A, 1, 0.0)
    router.sent(A)
    assert not router.has_earned(A, 0, 0.0)
    router.ended(A)
    router.answered(A, 0.2)
    assert router.has_earned(A, 1, 0.0)
    assert router.has_earned(C, 0, 0.0)
    assert not router.has_earned(C, 1, 0.0), "of one that was never sent anything as well"


def test_peers_that_are_not_known_any_more_are_forgotten_but_not_before_their_pauses_end():
    router = told(a=0.1, b=0.1, c=0.1)
    router.failed(B, 5.0)
    router.sent(C)
    router.forget_others({PeerId("d")}, 5.5)
    assert set(router.peers) == {B, C}
    router.ended(C)
    router.forget_others({C}, 7.0)
    assert set(router.peers) == {C}


def test_a_missed_deadline_says_that_the_peer_may_be_slower_than_known():
    router = told(a=0.1)
    assert router.expected_seconds(A) is None
    router.answered(A, 0.5)
    router.overdue(A, 2.0)
    assert 0.5 < router.expected_seconds(A) < 2.0


@given(st.lists(st.tuples(st.sampled_from("sefbaxt"), st.sampled_from([A, B, C])), max_size=60))
def test_in_flight_is_never_negative_and_a_choice_always_has_room(happenings):
    router, now = Router(Random(2)), 0.0
    for what, peer in happenings:
        now += 0.1
        if what == "s":
            chosen = router.choose([A, B, C], now)
            assert (chosen is not None) == router.has_room([A, B, C], now)
            if chosen is not None:
                assert router.peers[chosen].in_flight < router.peers[chosen].slots
                assert router.peers[chosen].in_flight < router.peers[chosen].earned
                assert router.peers[chosen].blocked_until <= now
                router.sent(chosen)
        elif what == "e":
            router.ended(peer)
        elif what == "f":
            router.failed(peer, now)
        elif what == "b":
            router.busy(peer, now)
        elif what == "a":
            router.answered(peer, 0.3)
        elif what == "t":
            router.on_credit(peer, 3, 0.2, 1)
        else:
            router.forget_others({A, B, C} - {peer}, now)
        assert all(estimate.in_flight >= 0 for estimate in router.peers.values())
