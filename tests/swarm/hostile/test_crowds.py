"""Keys that nobody invited, many for each honest peer: the honest stay together, and a newcomer gets in."""

from peers.lab.bench.crowds import WATCHED_SECONDS, bench
from swarmnet.membership.guests import MOST_OF_RANGE
from swarmnet.membership.overlay import RINGS


def test_in_a_crowd_the_honest_stay_linked_and_train_and_a_newcomer_is_in_step_within_seconds():
    (row,) = bench([40], honest=3)
    assert row.honest_links == 3, "the two others and the newcomer"
    assert row.links <= 3 + MOST_OF_RANGE + 2 * RINGS + 1
    assert row.join_seconds < WATCHED_SECONDS / 2
    assert row.votes == 0
    assert row.commits > 0
