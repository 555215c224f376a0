"""Microbatches played through topologies: times as by hand, both players alike, no rule broken, a death."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.skipping import topologies
from peers.skipping.bench import Row, assert_legal, bench, render, with_a_kill
from peers.skipping.makespan import makespan
from peers.skipping.play import Outcome, Play, Visit
from peers.skipping.scouts import Scouts, capacity
from peers.skipping.search import places, play_chains, random_skips, search_full
from peers.skipping.topologies import SITES, Topology, draw, hop_seconds, latency_seconds, placed
from swarmnet import chains
from swarmnet.paths import IllegalPath, Rules, choices, visit

RULES = Rules.of(6, 1 / 3, 2)


class FixedRoutes:
    """Every microbatch has its whole way from the start."""

    def __init__(self, routes: Iterable[Sequence[int]]) -> None:
        """Routes in the order of the microbatches: those of the first origin, of the second, ..."""
        self.onward = [dict(pairwise(route)) for route in routes]
        self.play: Play | None = None

    def enter(self, play: Play) -> None:
        self.play = play

    def forward_begins(self, visit: Visit) -> None:
        assert self.play is not None
        following = self.onward[visit.microbatch].get(visit.peer)
        if following is not None:
            self.play.go_on(visit, following)

    def ended(self, visit: Visit) -> None:
        pass

    def lost(self, visit: Visit) -> None:
        raise NotImplementedError("a fixed route has no other way")


def play_routes(topology: Topology, routes: Sequence[Sequence[int]]) -> Outcome:
    """Routes in any order; those of one origin start in the order given."""
    origins = topology.peers_of(0)
    by_origin = [[route for route in routes if route[0] == origin] for origin in origins]
    guide = FixedRoutes(route for group in by_origin for route in group)
    return Play(topology, guide, [len(group) for group in by_origin]).run()


def even(sizes, hop=1.0, memory=2, forward=1.0):
    """All hops alike, messages at once."""
    stage = tuple(number for number, size in enumerate(sizes) for _ in range(size))
    count = len(stage)
    return Topology(
        ("here",) * count,
        stage,
        ((0.0,) * count,) * count,
        ((hop,) * count,) * count,
        (forward,) * count,
        memory,
    )


def test_one_microbatch_takes_its_hops_and_computes():
    hops, forwards, last, backwards = 4 * 1.0, 2 * 1.0, 2.75, 2 * 1.5
    assert play_routes(even((1, 1, 1)), [(0, 1, 2)]).seconds == hops + forwards + last + backwards


def test_memory_admits_no_more_microbatches_than_it_holds():
    one = play_routes(even((1, 1, 1), memory=1), [(0, 1, 2)] * 2)
    assert one.seconds == 2 * play_routes(even((1, 1, 1)), [(0, 1, 2)]).seconds
    two = play_routes(even((1, 1, 1), memory=2), [(0, 1, 2)] * 2)
    assert two.seconds < one.seconds
    assert (one.most_held, two.most_held) == ((1, 1, 0), (2, 2, 0))


def test_a_processor_does_one_thing_at_a_time_and_backward_first():
    # The second's forward ends at 2; the first is back at 1 + 1 + 2.75 + 1 = 5.75, the second 2.75 later.
    assert play_routes(even((1, 1)), [(0, 1)] * 2).seconds == 1 + 1 + 2 * 2.75 + 1 + 1.5


@given(st.integers(0, 50), st.integers(1, 6), st.integers(1, 40), st.data())
@settings(max_examples=20, deadline=None)
def test_the_quick_player_gives_the_same_time(seed, memory, count, data):
    topology = draw(seed, memory)
    chance = Random(data.draw(st.integers(0, 99)))
    routes = [tuple(chance.choice(topology.peers_of(s)) for s in range(6)) for _ in range(count)]
    assert makespan(topology, routes) == play_routes(topology, routes).seconds


@given(st.integers(0, 10_000), st.integers(1, 6))
@settings(max_examples=8, deadline=None)
def test_online_every_path_is_legal_and_memory_is_kept(seed, memory):
    topology = draw(seed, memory)
    outcome = Play(topology, Scouts(RULES), [6] * 5).run()
    assert len(outcome.paths) == 30
    assert all(len(path) == RULES.shortest for path in outcome.paths)
    assert_legal(topology, RULES, outcome)


@given(st.integers(0, 10_000), st.integers(2, 4), st.floats(0.05, 0.95), st.integers(5, 16))
@settings(max_examples=8, deadline=None)
def test_a_peer_killed_at_any_time_costs_each_of_its_microbatches_one_other_way(seed, memory, when, victim):
    topology = draw(seed, memory)
    calm = Play(topology, Scouts(RULES), [6] * 5).run()
    play = Play(topology, Scouts(RULES), [6] * 5)
    on_it: list[Visit] = []

    def kill():
        on_it.extend(visit for visit in play.visits if visit.peer == victim)
        play.kill(victim)

    play.at(when * calm.seconds, kill)
    outcome = play.run()
    assert len(outcome.paths) == 30
    assert outcome.rerouted == {visit.microbatch: 1 for visit in on_it}
    assert_legal(topology, RULES, outcome)


def test_the_work_above_a_killed_peer_is_not_done_again():
    topology = even((1, 1, 2, 2), memory=4)
    play = Play(topology, Scouts(Rules.of(4, 0.0, 0)), [1])
    play.at(4.5, play.kill, 2)  # stage 2 holds the microbatch from 4 on, or its twin does
    play.at(4.5, play.kill, 4)
    seconds = play.run().seconds
    undisturbed = Play(topology, Scouts(Rules.of(4, 0.0, 0)), [1]).run().seconds
    assert undisturbed < seconds < undisturbed + 4.5


def test_an_origin_cannot_be_killed():
    play = Play(draw(0), Scouts(RULES), [6] * 5)
    with pytest.raises(ValueError, match="origin"):
        play.kill(0)


def test_a_broken_rule_in_a_finished_path_is_found():
    topology = draw(0)
    outcome = play_routes(topology, [(0, 5, 6, 17)])
    with pytest.raises(IllegalPath):
        assert_legal(topology, RULES, outcome)


class Careless:
    """Takes any legal peer, swaps included, and waits wherever it is full."""

    def __init__(self, chance):
        self.chance = chance

    def enter(self, play):
        self.play = play

    def forward_begins(self, visited):
        from swarmnet.paths import begin

        header = visited.header or begin(RULES)
        if header.hops_left:
            after = visit(header, self.chance.choice(choices(header, RULES)), RULES)
            peers = self.play.topology.peers_of(after.visited[-1])
            self.play.go_on(visited, self.chance.choice(peers), after)

    def ended(self, visited):
        pass


def test_swaps_that_are_waited_for_can_deadlock_and_the_online_rule_never_does():
    stuck = 0
    for seed in range(20):
        topology = even((4, 1, 1, 1, 1, 1), memory=1)
        careless = Play(topology, Careless(Random(seed)), [3] * 4).run()
        stuck += careless.seconds == float("inf")
        assert Play(topology, Scouts(RULES), [3] * 4).run().seconds < float("inf")
    assert stuck > 0


@pytest.mark.parametrize("seed", range(3))
def test_online_is_near_the_plan_and_far_below_blind_skipping(seed):
    topology = draw(seed, 3)
    seen = places(topology, RULES, lambda peer: capacity(topology, peer))
    planned = play_chains(topology, chains.plan(seen, Random(seed)), 6)
    online = Play(topology, Scouts(RULES), [6] * 5).run().seconds
    assert online < 1.05 * planned
    assert online < 0.8 * random_skips(topology, RULES, 6, Random(seed))


FULL_SECONDS = (61.0, 67.1, 62.5, 58.9, 64.8, 64.6, 65.4, 59.2, 62.6, 66.4)
"""Of the best full pipelines that 60,000 changes each found for seeds 0 to 9 at memory 3, half a minute of
search per seed (docs/benchmarks/skipping.md, 1) ..."""
LONGER_SEARCHED = {0: 60.2, 1: 67.0}
"""... and that 240,000 changes found."""


def test_online_takes_half_as_long_as_the_best_full_pipeline_that_a_search_found():
    """The requirement; measured were 52.5 % below on average, 52.0 and 54.4 % for those searched longer."""
    online = [Play(draw(seed, 3), Scouts(RULES), [6] * 5).run().seconds for seed in range(len(FULL_SECONDS))]
    below = [1 - seconds / full for seconds, full in zip(online, FULL_SECONDS, strict=True)]
    assert fmean(below) >= 0.5
    assert min(below) >= 0.48, "two of the ten lie a little under one half"
    for seed, full in LONGER_SEARCHED.items():
        assert online[seed] <= 0.5 * full


@pytest.mark.parametrize("seed", LONGER_SEARCHED)
def test_what_the_long_searches_found_is_still_where_a_short_one_leads(seed):
    """Otherwise the figures above would be those of other topologies, or of a search that finds more now."""
    best = LONGER_SEARCHED[seed]
    assert best <= search_full(draw(seed, 3), 30, 3000, Random(seed)) < 1.2 * best


def test_the_search_for_a_full_pipeline_gets_better_with_steps():
    topology = draw(1, 3)
    times = [search_full(topology, 30, steps, Random(1)) for steps in (0, 200, 2000)]
    assert times == sorted(times, reverse=True)
    assert times[2] < 0.9 * times[0]


def test_hops_follow_from_the_map():
    assert len(SITES) == 12
    assert latency_seconds("London", "New York") == pytest.approx(0.0448, rel=0.01)
    assert latency_seconds("Tokyo", "Tokyo") == topologies.SAME_SITE_SECONDS
    for a in SITES:
        for b in SITES:
            assert latency_seconds(a, b) == latency_seconds(b, a)
            assert 0.85 < hop_seconds(a, b) < 3.0


def test_the_same_seed_draws_the_same_swarm_and_placing_only_moves_stages():
    topology = draw(7, 4)
    assert topology == draw(7, 4)
    assert topology != draw(8, 4)
    laid_out = placed(topology, 7)
    assert laid_out.stage == topology.stage
    assert sorted(laid_out.site) == sorted(topology.site)
    assert search_full(laid_out, 30, 300, Random(0)) < search_full(topology, 30, 300, Random(0))
    for a in range(20):
        for b in range(20):
            assert laid_out.hop[a][b] == hop_seconds(laid_out.site[a], laid_out.site[b])


def test_the_bench_reports_what_it_played():
    (row,) = bench([0], 3, 50)
    assert isinstance(row, Row)
    assert row.visits[0] == row.visits[-1] == 30
    assert sum(row.visits) == 30 * RULES.shortest
    assert set(row.rerouted) <= {1}
    assert len(row.rerouted) == row.killed_held
    assert row.gain == 1 - row.online / row.full
    assert render([row, row]).row_count == 3


def test_half_way_the_busiest_peer_is_the_one_that_dies():
    topology = draw(4, 3)
    calm = Play(topology, Scouts(RULES), [6] * 5).run()
    outcome, held = with_a_kill(topology, RULES, calm)
    assert held > 0
    assert sum(outcome.rerouted.values()) == held
