"""Whom the next microbatch goes to: the soonest done, by measured times and what is under way there."""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.router import FIRST_BACK_OFF_SECONDS, LONGEST_BACK_OFF_SECONDS, Router

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def measured(**seconds: float) -> Router:
    router = Router(Random(1))
    for peer, service in seconds.items():
        router.answered(PeerId(peer), service)
    return router


def test_work_is_shared_in_proportion_to_speed():
    router, done = measured(a=0.1, b=0.3), Counter()
    finish: list[tuple[float, PeerId]] = []
    free_at = {A: 0.0, B: 0.0}
    now = 0.0
    for _ in range(400):
        while len(finish) < 5:
            peer = router.choose([A, B], now)
            assert peer is not None
            router.sent(peer)
            free_at[peer] = max(now, free_at[peer]) + {A: 0.1, B: 0.3}[peer]
            heapq.heappush(finish, (free_at[peer], peer))
        now, peer = heapq.heappop(finish)
        router.ended(peer)
        done[peer] += 1
    assert 2.5 < done[A] / done[B] < 3.5


def test_equals_are_drawn_by_chance_and_the_clearly_slower_is_not():
    router = measured(a=0.1, b=0.105, c=0.2)
    drawn = Counter(router.choose([A, B, C], 0.0) for _ in range(400))
    assert drawn[C] == 0
    assert min(drawn[A], drawn[B]) > 140


def test_a_peer_that_was_never_measured_is_tried_at_once():
    router = measured(a=0.1)
    assert Counter(router.choose([A, B], 0.0) for _ in range(50)).keys() == {A, B}


def test_full_peers_and_those_to_avoid_are_left_out_but_the_avoided_are_better_than_none():
    router = measured(a=0.1, b=1.0)
    assert router.choose([A, B], 0.0, avoid={A}) == B
    assert router.choose([A], 0.0, avoid={A}) == A
    for _ in range(4):
        router.sent(B)
    assert router.choose([B], 0.0) is None
    assert router.choose([A, B], 0.0, avoid={A}) == A
    assert router.choose([], 0.0) is None


def test_a_peer_that_fails_is_left_alone_for_a_while_that_doubles_until_it_answers():
    router, now, pauses = measured(a=0.1), 0.0, []
    for _ in range(8):
        router.failed(A, now)
        pauses.append(router.peers[A].blocked_until - now)
        assert router.choose([A], now) is None
        now = router.peers[A].blocked_until
        assert router.choose([A], now) == A
    assert 0.8 * FIRST_BACK_OFF_SECONDS <= pauses[0] <= 1.2 * FIRST_BACK_OFF_SECONDS
    assert pauses[1] > 1.3 * pauses[0]
    assert max(pauses) <= 1.2 * LONGEST_BACK_OFF_SECONDS
    router.answered(A, 0.1)
    router.failed(A, now)
    assert router.peers[A].blocked_until - now <= 1.2 * FIRST_BACK_OFF_SECONDS


def test_busy_is_a_short_pause_and_no_failure():
    router = measured(a=0.1)
    router.busy(A, 5.0)
    assert router.choose([A], 5.05) is None
    assert router.choose([A], 5.2) == A
    assert router.peers[A].failures == 0


@given(st.lists(st.tuples(st.sampled_from("sefbax"), st.sampled_from([A, B, C])), max_size=60))
def test_in_flight_is_never_negative_and_a_choice_always_has_room(happenings):
    router, now = Router(Random(2)), 0.0
    for what, peer in happenings:
        now += 0.1
        if what == "s":
            chosen = router.choose([A, B, C], now)
            if chosen is not None:
                assert router.peers[chosen].in_flight < router.peers[chosen].slots
                assert router.peers[chosen].blocked_until <= now
                router.sent(chosen)
        elif what == "e":
            router.ended(peer)
        elif what == "f":
            router.failed(peer, now)
        elif what == "b":
            router.busy(peer, now)
        elif what == "a":
            router.answered(peer, 0.2)
        else:
            router.forget(peer)
        assert all(estimate.in_flight >= 0 for estimate in router.peers.values())
