"""Pauses that grow: bounded, whatever came before."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId
from swarmnet.routing.load_balancer import LONGEST_BACK_OFF_SECONDS, Router


@given(st.integers(0, 10**9))
def test_a_pause_doubles_up_to_the_longest(times):
    assert doubled(0.5, times, 8.0) == (0.5 * 2**times if times < 4 else 8.0)


def test_a_peer_that_has_failed_for_days_is_still_left_alone_for_a_bounded_time():
    router, peer = Router(Random(1)), PeerId("broken")
    for _ in range(2000):
        router.failed(peer, 0.0)
        router.busy(peer, 0.0)
    router.failed(peer, 0.0)
    assert 0 < router.peers[peer].blocked_until <= 1.2 * LONGEST_BACK_OFF_SECONDS
