"""Experts that are alike move towards one another, by a schedule that ends, to the same bits everywhere."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_sizes import model_shape

from swarmnet.model.experts.merging import SHARE_BITS, ExpertMerging, nearest_of
from swarmnet.model.fixed_point import to_units
from swarmnet.model.flat_layout import expert_of, layout_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.optimizer.method import method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Experts, Sync

EXPERTS = Experts(num_experts=4, top_k=2, merge_rounds=2, merge_until=10, merge_share=0.25, merge_nearest=2)
SHAPE = model_shape(width=16, layers=2, heads=2, kv_heads=2, inner=24, qk_norm=True, experts=EXPERTS)
LAYOUT = layout_of(parameter_shapes(SHAPE, whole(SHAPE)))


def weights(seed=0):
    return to_units(0.05 * torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed)))


def by_expert(units, layer, matrix):
    """float64 [E, P]"""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight" for expert in range(EXPERTS.num_experts)
    ]
    places = {entry.name: entry.place for entry in LAYOUT.entries}
    return torch.stack([units[places[name]] for name in names]).double()


def test_it_is_the_papers_formula_rounded():
    before, after = weights(), weights()
    ExpertMerging(EXPERTS, LAYOUT).merge(after, 1)
    share = 0.25 * (1 - 1 / 10)
    for layer in range(2):
        gates = by_expert(before, layer, "gate_proj")
        cosines = torch.nn.functional.cosine_similarity(gates[:, None], gates[None], dim=-1)
        cosines.fill_diagonal_(-2)
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            old, new = by_expert(before, layer, matrix), by_expert(after, layer, matrix)
            for expert in range(EXPERTS.num_experts):
                nearest = cosines[expert].topk(2).indices
                expected = old[expert] + share * (old[nearest].mean(dim=0) - old[expert])
                assert (new[expert] - expected).abs().max() < 1.5 + 2**-SHARE_BITS * (1 << 22)


def test_nothing_but_experts_moves():
    before, after = weights(), weights()
    ExpertMerging(EXPERTS, LAYOUT).merge(after, 1)
    for entry in LAYOUT.entries:
        stays = torch.equal(before[entry.place], after[entry.place])
        assert stays == (expert_of(entry.name) is None), entry.name


def test_it_comes_every_so_many_rounds_ever_less_and_ends():
    merging = ExpertMerging(EXPERTS, LAYOUT)
    shares = [merging.share(round) for round in range(14)]
    assert [round for round, share in enumerate(shares) if share] == [1, 3, 5, 7, 9]
    assert sorted(filter(None, shares), reverse=True) == list(filter(None, shares))
    assert ExpertMerging(replace(EXPERTS, merge_rounds=0), LAYOUT).share(1) == 0


def test_equal_experts_stay_equal_and_near_ones_come_nearer():
    units = weights()
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        names = [f"model.layers.0.mlp.experts.{expert}.{matrix}.weight" for expert in (0, 1)]
        first, second = (next(entry for entry in LAYOUT.entries if entry.name == name) for name in names)
        units[second.place] = units[first.place]
    apart = by_expert(units, 1, "up_proj").var(dim=0).sum()
    for _ in range(3):
        ExpertMerging(replace(EXPERTS, merge_until=10**6, merge_nearest=3), LAYOUT).merge(units, 1)
    gates = by_expert(units, 0, "gate_proj")
    assert torch.equal(gates[0], gates[1])
    assert by_expert(units, 1, "up_proj").var(dim=0).sum() < apart / 4


@given(st.lists(st.lists(st.integers(-(2**24), 2**24), min_size=3, max_size=3), min_size=3, max_size=6))
def test_the_nearest_are_found_whatever_the_numbers(gates):
    found = nearest_of(torch.tensor(gates), 2)
    assert all(len(set(nearest) - {expert}) == 2 for expert, nearest in enumerate(found))


def test_a_replica_merges_when_a_round_settles_and_lives_on_from_there():
    run = Manifest("experts", "owner", stages=(2,), model=SHAPE, sync=Sync(method="local-steps"))
    here, there = (
        Replica(
            layout=LAYOUT,
            method=method_of(run, LAYOUT),
            units=weights(),
            merging=ExpertMerging(EXPERTS, LAYOUT),
        )
        for _ in range(2)
    )
    for round in range(2):
        here.apply(round)
        here.settle(round)
    assert not torch.equal(here.settled_units(), weights())
    there.apply(0)
    there.apply(1)
    there.settle(0)
    assert torch.equal(there.settled_units(), weights())
    assert there.settle(1) == here.digest(), "however many rounds were open meanwhile"
    torch.testing.assert_close(there.live_floats(ahead=False), here.live_floats(ahead=False), rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_bits_do_not_depend_on_how_the_products_are_summed(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gates = torch.randint(-(2**22), 2**22, (6, 4099), generator=torch.Generator().manual_seed(5))
        found = nearest_of(gates, 3)
    finally:
        torch.set_num_threads(before)
    exact = [[sum(a * b for a, b in zip(one, other, strict=True)) for other in (gates >> 9).tolist()]
             for one in (gates >> 9).tolist()]  # fmt: skip
    for expert, nearest in enumerate(found):

        def nearness(other, expert=expert):
            product = exact[expert][other]
            return product * abs(product) / exact[other][other]

        assert nearest == sorted(set(range(6)) - {expert}, key=nearness, reverse=True)[:3]
