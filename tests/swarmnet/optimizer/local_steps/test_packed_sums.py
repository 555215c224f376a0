"""Sums of what peers say, in few bits, are the sums of what they say."""

from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.optimizer.delta_codecs.delta_codec import sum_of
from swarmnet.optimizer.delta_codecs.packed_sums import packed
from swarmnet.optimizer.delta_codecs.sign_codec import EncodedSigns

SUMS = st.lists(
    st.tuples(st.lists(st.integers(-(1 << 20), 1 << 20), min_size=3, max_size=3), st.integers(0, 10)),
    min_size=1, max_size=5,
)  # fmt: skip
COUNTS = st.lists(st.integers(1, 300), min_size=5, max_size=5)


@given(SUMS, COUNTS, st.sampled_from([torch.int32, torch.int64]))
def test_means_are_those_of_whole_numbers_with_halves_upwards(said, counts, kind):
    sums = [[number << shift for number in row] for row, shift in said]
    found = packed(torch.tensor(sums, dtype=kind), torch.tensor(counts[: len(sums)])[:, None]).means()
    for row, sums_of_row in enumerate(sums):
        for column, exact in enumerate(sums_of_row):
            mean = floor(Fraction(exact, counts[row]) + Fraction(1, 2))
            assert int(found[row, column]) == mean
    alike = packed(torch.tensor(sums, dtype=kind), counts[0]).means()
    each = torch.full((len(sums), 1), counts[0])
    assert torch.equal(alike, packed(torch.tensor(sums, dtype=kind), each).means())


def test_of_some_peers_that_move_alike_a_byte_holds_each_sum_and_of_many_two():
    def numbers(peers):
        negative = torch.tensor([[False, True, False]])
        moves = [
            EncodedSigns(negative, torch.tensor([[12 + peer % 3]], dtype=torch.int32))
            for peer in range(peers)
        ]
        return packed(sum_of(moves), peers).numbers.dtype

    assert [numbers(peers) for peers in (1, 25, 200)] == [torch.int8, torch.int8, torch.int16]


@pytest.mark.parametrize(("most", "kind"), [(8_380_000, torch.float32), (7 * 4097 << 20, torch.float64)])
def test_a_mean_by_floats_is_that_by_whole_numbers_where_it_is_nearest_to_one(most, kind):
    counts = torch.tensor([[2], [3], [31], [4095], [4097]])
    wholes = (most // counts).clamp(max=7 << 20) * counts
    sums = torch.cat([wholes + half * counts // 2 + more for half in (0, 1, -1) for more in (-1, 0, 1)], 1)
    exact = torch.div(2 * sums + counts, 2 * counts, rounding_mode="floor").to(torch.int32)
    found = packed(sums, counts)
    assert found.kind == kind
    assert torch.equal(found.means(), exact)
