"""Factors that bring gradients into the range of float16."""

from math import inf, nan

import pytest

from swarmnet.model.computing.loss_scale import GROWTH_INTERVAL, MAX_EXPONENT, MIN_EXPONENT, LossScale


@pytest.mark.parametrize("largest", [1e-30, 3e-5, 0.75, 1.0, 5e4, 1e30])
def test_the_largest_value_becomes_a_half_to_one(largest):
    assert 0.5 <= largest * LossScale(True).factor(largest) < 1.0


@pytest.mark.parametrize("largest", [0.0, inf, nan])
def test_what_cannot_be_scaled_is_left_as_it_is(largest):
    assert LossScale(True).factor(largest) == 1.0
    assert LossScale(False).factor(3e-5) == 1.0


def test_factors_shrink_after_results_that_are_not_finite_and_grow_again():
    scale = LossScale(True)
    first = scale.factor(1.0)
    scale.record(False)
    assert scale.factor(1.0) == first / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scale.record(True)
    assert scale.factor(1.0) == first / 2
    scale.record(True)
    assert scale.factor(1.0) == first
    for _ in range(100):
        scale.record(False)
    assert scale.factor(1.0) == first * 2.0**MIN_EXPONENT
    for _ in range(100 * GROWTH_INTERVAL):
        scale.record(True)
    assert scale.factor(1.0) == first * 2.0**MAX_EXPONENT
