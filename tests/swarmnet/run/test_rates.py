"""A learning rate that the run's owner changes: exact, and the same in all that a group settles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from swarm import OWNER, tiny_manifest

from protocols.errors import Malformed
from protocols.signed.orders import open_order, seal_order
from swarmnet.identifiers import ContributionId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.step import dense, sign_step
from swarmnet.rounds.contribution_sets import set_digest
from swarmnet.rounds.history import SettledSet, link
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER, OrderError, OwnerOrders
from swarmnet.run.rates import LARGEST_FACTOR, MAX_RATES, WHOLE, RateChange, factor_of, factors, scaled

HALF = WHOLE // 2
RUN_ID = tiny_manifest().run_id()


# -- what is ordered ----------------------------------------------------------------------------------


def test_of_what_is_ordered_the_last_one_given_counts_from_its_round_on():
    rates = (RateChange(10, 500), RateChange(30, 250), RateChange(20, 2000))
    assert [factor_of(rates, round) for round in (0, 9, 10, 19, 20, 30, 99)] == [
        WHOLE, WHOLE, 500, 500, 2000, 2000, 2000
    ]  # fmt: skip
    assert set(factors(rates)) == {WHOLE, 500, 250, 2000}
    assert factor_of((), 5) == WHOLE


def test_a_factor_scales_whole_units_and_never_to_nothing():
    assert scaled(16777, WHOLE) == 16777
    assert scaled(16777, 500) == 8389
    assert scaled(1, 1) == 1
    assert scaled(1 << 30, LARGEST_FACTOR) == 1 << 30


def test_a_step_is_scaled_by_the_factor_in_whole_units():
    manifest, layout = tiny_manifest(), layout_of({"weight": (64,)})
    signs = torch.ones(layout.size, dtype=torch.int8)
    whole = dense(sign_step(signs, layout, manifest, 5), layout)
    half = dense(sign_step(signs, layout, manifest, 5, HALF), layout)
    assert set(half.tolist()) == {-scaled(-int(whole[0]), HALF)}


def test_the_factor_is_part_of_what_a_set_is_called_and_no_factor_changes_nothing():
    ids = [ContributionId(bytes([number]) * 16) for number in range(3)]
    assert set_digest(ids, WHOLE) == set_digest(ids)
    named = {factor: set_digest(ids, factor) for factor in (WHOLE, HALF, 250)}
    assert len(set(named.values())) == 3
    assert len({link(b"\0" * 12, SettledSet(3, digest)) for digest in named.values()}) == 3


def test_an_order_of_a_rate_says_what_makes_no_sense():
    half = owner_orders.rate(NO_ORDER, HALF, 40, "the loss stands still")
    assert half.rates == (RateChange(40, HALF),)
    with pytest.raises(OrderError, match=r"0\.5 times the manifest's from round 40 on already"):
        owner_orders.rate(half, HALF, 40, "")
    for factor in (0, LARGEST_FACTOR + 1):
        with pytest.raises(OrderError, match=r"between 0\.001 and 100"):
            owner_orders.rate(NO_ORDER, factor, 40, "")
    many = NO_ORDER
    for round in range(MAX_RATES + 5):
        many = owner_orders.rate(many, HALF, round, "")
    assert [rate.from_round for rate in many.rates] == list(range(5, MAX_RATES + 5))
    assert owner_orders.describe_changes(half, owner_orders.rate(half, 250, 90, "")) == [
        "the learning rate is 0.25 times the manifest's from round 90 on"
    ]


def test_rates_and_the_end_travel_and_an_order_without_them_is_as_it_was():
    order = OwnerOrders(sequence=7, rates=(RateChange(40, HALF), RateChange(80, 250)), ends=127)
    assert seal_order(OWNER, RUN_ID, order).order == order
    assert seal_order(OWNER, RUN_ID, replace(order, rates=())).order.ends == 127
    before = seal_order(OWNER, RUN_ID, OwnerOrders(sequence=7)).data
    assert len(before) < len(seal_order(OWNER, RUN_ID, order).data)
    assert open_order(before, RUN_ID).order.rates == ()
    with pytest.raises(Malformed):
        seal_order(OWNER, RUN_ID, replace(order, rates=(RateChange(40, 0),)))
    with pytest.raises(Malformed):
        seal_order(OWNER, RUN_ID, replace(order, rates=(RateChange(4, 5),) * (MAX_RATES + 1)))
