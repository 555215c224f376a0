"""What lines allow a peer of a stage: one rule for placing, routing and plans."""

from dataclasses import replace

from swarm import TINY_MODEL, tiny_manifest

from swarmnet.resources.bandwidth_estimate import contribution_bytes, gossip_per_peer, traffic_of
from swarmnet.resources.link_bandwidth import (
    UNKNOWN,
    Crossing,
    LinkBandwidth,
    carried,
    crossings,
    seconds_on_line,
)
from swarmnet.run.schema import Sync

FOUR = tiny_manifest((1, 1, 1, 1), model=replace(TINY_MODEL, num_hidden_layers=4))
DOWN, UP = FOUR.body_bytes, FOUR.gradient_bytes


def test_stages_in_the_middle_send_twice_what_the_ends_do_and_the_only_one_sends_nothing():
    first, second, third, last = crossings(FOUR)
    assert first == Crossing(DOWN, UP)
    assert second == third == Crossing(DOWN + UP, DOWN + UP)
    assert last == Crossing(UP, DOWN)
    assert crossings(tiny_manifest((4,), model=FOUR.model)) == (Crossing(0.0, 0.0),)


def test_a_peer_does_what_the_slowest_of_its_computer_and_the_two_directions_of_its_line_does():
    each = Crossing(sent=100.0, received=50.0)
    assert carried(9.0, LinkBandwidth(1000.0, 1000.0), each) == 9.0
    assert carried(90.0, LinkBandwidth(1000.0, 1000.0), each) == 10.0
    assert carried(90.0, LinkBandwidth(1000.0, 100.0), each) == 2.0
    assert carried(90.0, UNKNOWN, each) == 90.0, "what is not known limits nothing"
    assert carried(90.0, LinkBandwidth(1.0, 1.0), Crossing()) == 90.0, (
        "nor does a line over which nothing goes"
    )
    assert seconds_on_line(LinkBandwidth(1000.0, 100.0), each) == 0.5
    assert seconds_on_line(UNKNOWN, each) == 0.0


def test_estimates_of_traffic_count_the_same_bytes():
    for stage, each in enumerate(crossings(FOUR)):
        traffic = traffic_of(FOUR, stage, FOUR.microbatch_tokens, 1)
        assert (traffic.sent, traffic.received) == (each.sent, each.received)


def test_a_further_peer_costs_a_group_its_contributions_unless_reducers_add_them_up():
    largest = max(contribution_bytes(FOUR, stage) for stage in range(4))
    assert gossip_per_peer(FOUR) == largest / FOUR.rounds.max_seconds
    assert gossip_per_peer(replace(FOUR, sync=Sync(method="local-steps", topology="sharded-reduce"))) == 0.0
