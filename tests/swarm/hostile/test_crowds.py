"""Keys that nobody invited, many for each honest peer: the honest stay together, and a newcomer gets in."""

from peers.lab.bench.crowds import bench
from swarmnet.membership.guests import MOST_OF_RANGE
from swarmnet.membership.overlay import RINGS


def test_in_a_crowd_the_honest_stay_linked_and_train_and_a_newcomer_is_in_step_as_soon_as_without_it():
    quiet, crowd = bench([0, 60], honest=6)
    assert crowd.honest_links == quiet.honest_links == 6, "the five others and the newcomer"
    assert crowd.links <= 6 + MOST_OF_RANGE + 2 * RINGS + 1
    assert crowd.join_seconds <= quiet.join_seconds / 0.9
    assert crowd.commits >= 0.9 * quiet.commits
    assert crowd.votes == 0
