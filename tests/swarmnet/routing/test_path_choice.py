"""Choosing the way on: the cheapest legal peer by bookings and costs to go, and what dead stages change."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.routing.capacity import Booking, Load, earliest_start
from swarmnet.routing.cheapest_path import NEVER, Neighbour, cheapest, costs_to_go, onward
from swarmnet.run.path_rules import PathHeader, PathRules, begin, choices, shorten, visit

IDLE = Load(memory=2, forward_seconds=1.0, backward_seconds=2.0)
SIX = PathRules.of(6, 1 / 3)


def load(*bookings, memory=2):
    return Load(memory, 1.0, 2.0, tuple(Booking(*b) for b in bookings))


@pytest.mark.parametrize(
    ("bookings", "arrival", "start"),
    [
        ((), 5.0, 5.0),
        (((0.0, 20.0),), 5.0, 5.0),  # one place is left
        (((0.0, 9.0), (1.0, 8.0)), 5.0, 9.0),  # at 8 one place is left, but the other's backward runs
        (((0.0, 15.0), (1.0, 8.0)), 5.0, 8.0),
        (((4.5, 20.0),), 5.0, 5.5),  # the processor is at another forward
        (((0.0, 6.0),), 5.0, 6.0),  # ... or at its backward
        (((0.0, 7.0), (6.0, 20.0)), 5.0, 7.0),  # would still be held when the booked one comes
    ],
)
def test_a_microbatch_starts_when_memory_and_processor_are_free(bookings, arrival, start):
    assert earliest_start(load(*bookings), arrival, 10.0, now=0.0) == start


def test_a_booking_that_should_be_over_still_holds_its_place():
    full = load((0.0, 3.0), (0.0, 3.0))
    assert earliest_start(full, 5.0, 10.0, now=5.0) > 5.0
    assert not full.has_room


bookings_drawn = st.lists(
    st.tuples(st.floats(0, 50), st.floats(3, 30)).map(lambda b: Booking(b[0], b[0] + b[1])), max_size=8
)


@given(bookings_drawn, st.integers(1, 4), st.floats(0, 60), st.floats(3, 40))
def test_a_start_is_never_before_arrival_nor_where_memory_is_full(bookings, memory, arrival, seconds):
    start = earliest_start(Load(memory, 1.0, 2.0, tuple(bookings)), arrival, seconds, now=0.0)
    assert start >= arrival
    if memory == 1:
        assert all(b.release <= start or b.start >= start + seconds for b in bookings)


def table_of(neighbours, stage):
    return costs_to_go(stage, SIX, neighbours)


def world(hop=1.0, loads=None, to_go=True):
    """One peer per stage, all a hop apart; tables as they settle."""
    peers = {
        stage: Neighbour(f"p{stage}", stage, hop, (loads or {}).get(stage, IDLE)) for stage in range(1, 6)
    }
    if to_go:
        for stage in (4, 3, 2, 1):
            others = [other for other in peers.values() if other.stage != stage]
            here = peers[stage]
            peers[stage] = Neighbour(here.peer, stage, hop, here.load, table_of(others, stage))
    return peers


def test_the_table_of_costs_to_go_is_the_cheapest_round_trip_ahead():
    peers = world()
    step = 2 * 1.0 + 3.0  # hop there and back, forward and backward
    assert peers[4].to_go[1] == step
    assert peers[1].to_go[2] == 2 * step
    assert 2 not in peers[4].to_go  # nothing lies between it and the last


def test_a_table_without_neighbours_leads_nowhere():
    assert costs_to_go(1, SIX, []) == {}
    only_last = [Neighbour("z", 5, 1.0, IDLE)]
    assert set(costs_to_go(3, SIX, only_last)) == {1}


def test_a_full_peer_is_passed_by_for_one_that_is_free_sooner():
    full = load((0.0, 30.0), (0.0, 30.0))
    header = begin(SIX)
    free = cheapest(header, SIX, world().values(), ready=1.0, now=0.0)
    assert free is not None
    assert free.header.visited[-1] in (1, 2, 3)
    assert free.start == 2.0
    chosen = cheapest(header, SIX, world(loads={1: full, 2: full}).values(), ready=1.0, now=0.0)
    assert chosen is not None
    assert chosen.header.visited == (0, 3)


def test_no_way_is_taken_that_could_not_be_completed():
    alone = [other for other in world().values() if other.stage in (4, 5)]
    assert cheapest(begin(SIX), SIX, alone, ready=0.0, now=0.0) is None


def test_peers_to_avoid_are_avoided():
    first = cheapest(begin(SIX), SIX, world().values(), 0.0, 0.0)
    second = cheapest(begin(SIX), SIX, world().values(), 0.0, 0.0, avoid={first.peer})
    assert second is not None
    assert second.peer != first.peer


@given(st.data(), st.sets(st.integers(1, 5)))
def test_online_choices_never_break_a_rule_and_end_on_the_last_stage(data, full):
    busy = load((0.0, 50.0), (0.0, 50.0))
    peers = list(world(hop=data.draw(st.floats(0.1, 3)), loads=dict.fromkeys(full, busy)).values())
    header, now = begin(SIX), 0.0
    while header.hops_left:
        away = data.draw(st.sets(st.sampled_from(["p1", "p2", "p3", "p4"]), max_size=1))
        choice = cheapest(header, SIX, peers, now, now, avoid=away) or cheapest(header, SIX, peers, now, now)
        assert choice is not None
        assert choice.header == visit(header, choice.header.stage, SIX)
        assert choice.back > choice.release > choice.start >= choice.arrival > now
        header, now = choice.header, choice.start
    assert header.stage == SIX.last


def leads_to_the_end(header, rules, live):
    return not header.hops_left or any(
        leads_to_the_end(visit(header, s, rules), rules, live) for s in choices(header, rules) if s in live
    )


@pytest.mark.parametrize("dead", [d for n in range(5) for d in combinations(range(1, 6), n)])
def test_dead_stages_are_skipped_within_the_budget_and_else_waited_for(dead):
    rules = PathRules(6, 2)
    live = set(range(1, 6)) - set(dead)
    way = onward(begin(rules, 6), rules, live)  # meant to visit all stages
    can = 5 in live and len(set(dead) - {5}) <= 2
    assert bool(way.stages) == can
    if can:
        assert way.header.hops_left == 5 - len(dead), "no more is skipped than has died"
        assert all(leads_to_the_end(visit(way.header, s, rules), rules, live) for s in way.stages)
        assert way.missing == ()
    else:
        assert way.missing == dead
        assert way.header == begin(rules, 6)


@given(st.integers(2, 8), st.integers(0, 4), st.sets(st.integers(1, 7)), st.data())
def test_the_ways_onward_are_exactly_those_that_can_be_completed(stages, skipped, live, data):
    rules = PathRules(stages, min(skipped, stages - 2))
    header = begin(rules, data.draw(st.integers(rules.shortest, stages)))
    for _ in range(data.draw(st.integers(0, header.hops_left - 1))):
        header = visit(header, data.draw(st.sampled_from(choices(header, rules))), rules)
    way = onward(header, rules, live)
    tried: PathHeader | None = header
    while tried is not None:
        good = [
            s for s in choices(tried, rules)
            if s in live and leads_to_the_end(visit(tried, s, rules), rules, live)
        ]  # fmt: skip
        if good:
            assert (way.header, list(way.stages)) == (tried, good)
            return
        tried = shorten(tried, rules)
    assert way.stages == ()


def test_without_skipping_there_is_one_way_and_a_dead_stage_is_waited_for():
    rules = PathRules.of(4, 0.0)
    assert onward(begin(rules), rules, {1, 2, 3}).stages == (1,)
    assert onward(begin(rules), rules, {1, 3}).missing == (2,)
    assert cheapest(begin(rules), rules, [], 0.0, 0.0) is None
    assert min([NEVER, 1.0]) == 1.0
