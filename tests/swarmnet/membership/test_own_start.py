"""Another process with this peer's identity is told from an earlier one that has ended."""

from __future__ import annotations

import pytest

from swarmnet.membership.own_start import OwnStart

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("signed", "proved"),
    [
        ([-20.0, -10.0, -1.0], "nothing"),  # A restart within a second.
        ([5.0], "nothing"),  # A record from a clock that was wrong: nothing shows that it is renewed.
        ([-20.0, 10.0], "earlier"),
        ([10.0, 40.0], "earlier"),
        ([-20.0, 2.0], "nothing"),  # Within the difference of two clocks.
        ([-20.0, 500.0], "nothing"),  # Signed in the future.
    ],
)
def test_only_renewed_records_prove_an_earlier_process(signed, proved):
    own = OwnStart()
    number = own.begin(1000.0)
    seen = [own.saw(number - 60 * SECOND, number + int(at * SECOND), 1000.0 + 60.0) for at in signed]
    assert seen[-1] == proved


def test_the_own_records_and_those_of_a_later_process_never_end_this_one():
    own = OwnStart()
    number = own.begin(1000.0)
    assert own.begin(1001.0) == number
    for at in range(10, 60, 10):
        assert own.saw(number, number + at * SECOND, 1060.0) == "nothing"
        assert own.saw(number + SECOND, number + at * SECOND, 1060.0) == "later"
