"""A few answers at once, then one each refill, each key by itself; what is full again costs no memory."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.membership.request_budget import BURST, RequestBudget


@given(st.lists(st.floats(0.0, 10.0), max_size=300))
def test_no_key_gets_more_than_a_burst_and_its_refills(pauses):
    budget: RequestBudget[str] = RequestBudget(refill_seconds=5.0)
    now, given_at = 0.0, []
    for pause in pauses:
        now += pause
        if budget.spend("peer", now):
            given_at.append(now)
    for first, start in enumerate(given_at):
        assert len([at for at in given_at[first:] if at < start + 20.0]) <= BURST + 4


def test_each_key_has_its_own_and_old_ones_are_forgotten():
    budget: RequestBudget[int] = RequestBudget(refill_seconds=1.0)
    for now in range(1000):
        assert budget.spend(now, float(now))
    assert len(budget) < 100
