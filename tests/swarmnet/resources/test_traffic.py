"""Who contributes how often, and so what a group sends."""

from dataclasses import replace

import pytest
from swarm import tiny_manifest

from swarmnet.resources.bandwidth_estimate import (
    contribution_bytes,
    contributions_per_second,
    result_bytes,
    rounds_per_second,
    traffic_of,
)
from swarmnet.run.schema import Rounds, Sync

MANIFEST = tiny_manifest(rounds=Rounds(global_batch_tokens=4 * tiny_manifest().microbatch_tokens))
MICROBATCH = MANIFEST.microbatch_tokens


@pytest.mark.parametrize(("peers", "contributors"), [(2, 2), (4, 4), (100, 4)])
def test_a_peer_that_had_no_microbatch_in_a_round_contributes_nothing(peers, contributors):
    """Each commits a microbatch per second, and a round is four of them."""
    alone, group = (traffic_of(MANIFEST, 1, MICROBATCH, count) for count in (1, peers))
    gossip = contributors * peers / 4 * contribution_bytes(MANIFEST, 1) * (peers - 1) / peers
    assert group.sent - alone.sent == pytest.approx(gossip)
    assert group.received - alone.received == pytest.approx(gossip)


def test_a_round_is_at_least_a_microbatch():
    small = replace(MANIFEST, rounds=Rounds(global_batch_tokens=1))
    assert rounds_per_second(small, 8 * MICROBATCH) == 8
    assert contributions_per_second(small, 8 * MICROBATCH, 100) == 8


def test_a_round_whose_time_is_up_closes_with_what_it_has_but_not_with_nothing():
    rounds = replace(MANIFEST, rounds=Rounds(global_batch_tokens=10**6, max_seconds=30.0))
    assert rounds_per_second(rounds, MICROBATCH) == pytest.approx(1 / 30)
    assert contributions_per_second(rounds, MICROBATCH, 10) == pytest.approx(10 / 30)
    assert rounds_per_second(rounds, MICROBATCH / 300) == pytest.approx(1 / 300)
    assert rounds_per_second(rounds, 0.0) == 0.0


def test_what_reducers_add_up_reaches_a_peer_once_whatever_the_size_of_its_group():
    """A group commits a microbatch per second, and a round is four of them."""
    sharded = replace(MANIFEST, sync=Sync(method="local-steps", topology="sharded-reduce"))
    results = result_bytes(sharded, 1) / 4
    bodies = traffic_of(sharded, 1, MICROBATCH, 1).sent
    for group, contributions in ((4, 1 / 4), (400, 1 / 400)):
        slices = contribution_bytes(sharded, 1) * contributions
        traffic = traffic_of(sharded, 1, MICROBATCH / group, group)
        assert traffic.sent == pytest.approx(bodies / group + slices + results)
