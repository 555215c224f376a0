"""How many microbatches stages carry where some are left out: none does more than it can, and none less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.lab.planner.visits import max_rate_with_skips, visit_shares


@given(st.lists(st.floats(0.1, 9.0), min_size=3, max_size=9), st.data())
def test_so_many_microbatches_find_stages_and_no_more(capacities, data):
    between = capacities[1:-1]
    middle = data.draw(st.integers(1, len(between)))
    most = max_rate_with_skips(capacities, middle)
    room = [sum(min(rate, one) for one in between) / middle for rate in (most, 1.001 * most)]
    assert room[0] >= most * 0.999999
    assert most <= min(capacities[0], capacities[-1])
    assert most == min(capacities[0], capacities[-1]) or room[1] < 1.001 * most
    shares = visit_shares(capacities, middle)
    assert sum(shares) == pytest.approx(middle + 2)
    assert max(shares) <= 1.0
    if len(between) == middle:
        assert most == pytest.approx(min(capacities))
        assert shares == pytest.approx([1.0] * len(capacities))
