"""Sums of what peers say, in few bits, are the sums of what they say."""

from fractions import Fraction
from math import floor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.optimizer.step import Term, added, mean_of

CPU = torch.device("cpu")


def term(values, exponents, first, largest, weight=1):
    values_CM = torch.tensor(values, dtype=torch.int8)
    exponents_C1 = torch.tensor(exponents, dtype=torch.int32)[:, None]
    rows = slice(first, first + len(exponents))
    return Term(rows, exponents_C1, values_CM.__getitem__, largest, weight)


TERMS = st.lists(
    st.tuples(
        st.lists(st.tuples(*[st.integers(-7, 7)] * 3), min_size=2, max_size=2),
        st.tuples(*[st.integers(0, 21)] * 2),
        st.integers(0, 2),
        st.integers(1, 300),
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(TERMS)
def test_means_are_those_of_whole_numbers_with_halves_upwards(said):
    sums = added([term(values, exponents, first, 7, weight) for values, exponents, first, weight in said],
                 4, 3, CPU)  # fmt: skip
    for row in range(4):
        here = [(values[row - first], exponents[row - first], weight)
                for values, exponents, first, weight in said if first <= row < first + 2]  # fmt: skip
        count = sum(weight for _, _, weight in here) or 1
        for column in range(3):
            exact = sum(values[column] * weight << exponent for values, exponent, weight in here)
            mean = floor(Fraction(exact, count) + Fraction(1, 2))
            assert int(sums.means(slice(row, row + 1))[0, column]) == mean


def test_of_some_peers_that_move_alike_a_byte_holds_each_sum_and_of_many_two():
    def numbers(peers):
        terms = [term([[1, -1, 1]], [12 + peer % 3], 0, 1) for peer in range(peers)]
        return added(terms, 1, 3, CPU).numbers.dtype

    assert [numbers(peers) for peers in (1, 25, 200)] == [torch.int8, torch.int8, torch.int16]


def test_a_mean_by_floats_is_that_by_whole_numbers_where_it_is_nearest_to_one():
    sums = torch.tensor([7 * count * (1 << 20) + more for count in (4095, 4097) for more in (-1, 0, 1)])
    counts = torch.tensor([4095] * 3 + [4097] * 3)
    exact = torch.div(2 * sums + counts, 2 * counts, rounding_mode="floor").to(torch.int32)
    assert torch.equal(mean_of(sums, counts), exact)
