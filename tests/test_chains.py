"""The annealed plan: disjoint, legal, seeded, and as good as trying all plans of a small swarm."""

from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.chains import NoPlan, Places, Told, longest, places_of, plan
from swarmnet.paths import Rules


def scattered(seed, sizes, rules, span=10.0):
    """Peers at points of a square; a hop takes their distance."""
    chance = Random(seed)
    stage = {f"{number}.{i}": number for number, size in enumerate(sizes) for i in range(size)}
    at = {peer: complex(chance.uniform(0, span), chance.uniform(0, span)) for peer in stage}
    return Places(rules, stage, lambda a, b: abs(at[a] - at[b]), lambda _peer: 1.0)


@given(st.integers(0, 1000), st.integers(2, 4), st.integers(0, 2))
@settings(max_examples=25)
def test_chains_are_legal_disjoint_and_share_the_last_stage_evenly(seed, size, swaps):
    rules = Rules.of(6, 1 / 3, swaps)
    places = scattered(seed, (size, *[size] * 4, 2), rules)
    chains = plan(places, Random(seed), steps=200)
    assert [chain[0] for chain in chains] == places.of(0)
    assert all(places.is_legal(chain) and len(chain) == rules.shortest for chain in chains)
    middle = [peer for chain in chains for peer in chain[1:-1]]
    assert len(set(middle)) == len(middle)
    ends = [chain[-1] for chain in chains]
    assert all(ends.count(peer) <= -(-size // 2) for peer in ends)


def test_the_same_seed_gives_the_same_plan():
    places = scattered(1, (4, 3, 3, 3, 3, 3), Rules.of(6, 1 / 3, 2))
    assert plan(places, Random(5), 500) == plan(places, Random(5), 500)


def test_a_plan_is_made_of_what_peers_tell():
    stage = {"0.0": 0, "0.1": 0, "1.0": 1, "1.1": 1, "2.0": 2, "2.1": 2, "3.0": 3}
    near = {"0.0": {"1.0": 0.1, "3.0": 0.2}, "1.0": {"3.0": 0.1}, "0.1": {"2.0": 0.2}, "2.0": {"3.0": 0.3}}
    told = {peer: Told(number, 1.0, near.get(peer, {})) for peer, number in stage.items()}
    places = places_of(Rules(4, 1, 1), told)
    assert places.hop("0.0", "1.0") == 0.1
    assert places.hop("0.0", "2.1") == 0.3, "what nobody has measured is as far as the farthest"
    assert plan(places, Random(1)) == (("0.0", "1.0", "3.0"), ("0.1", "2.0", "3.0"))
    assert not places.is_legal(("0.0", "2.0", "1.0", "3.0")), "no swaps"


@pytest.mark.parametrize("seed", range(4))
def test_a_small_swarm_gets_the_best_of_all_plans(seed):
    places = scattered(seed, (2, 2, 2, 2), Rules(4, 1, 1))
    middle = places.of(1) + places.of(2)
    best = min(
        longest(places, chains)
        for a, b in permutations(middle, 2)
        for ends in product(places.of(3), repeat=2)
        for chains in ([("0.0", a, ends[0]), ("0.1", b, ends[1])],)
        if len(set(ends)) == 2
    )
    assert longest(places, plan(places, Random(seed), 3000)) == pytest.approx(best)


def test_annealing_beats_the_plan_it_starts_from():
    places = scattered(3, (5, 3, 3, 3, 3, 3), Rules.of(6, 1 / 3, 2))
    start = longest(places, plan(places, Random(0), steps=0))
    assert longest(places, plan(places, Random(0))) < 0.85 * start


def test_another_cost_is_minimised_instead():
    places = scattered(2, (3, 3, 3, 3, 3, 3), Rules.of(6, 1 / 3, 0))
    stages = plan(places, Random(0), 2000, lambda p, chains: sum(p.stage[c] for x in chains for c in x[1:-1]))
    assert sorted(places.stage[peer] for chain in stages for peer in chain[1:-1]) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("sizes", [(3, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 0)])
def test_too_few_peers_are_reported(sizes):
    with pytest.raises(NoPlan, match="too few"):
        plan(scattered(0, sizes, Rules.of(6, 1 / 3, 0)), Random(0))
