"""How far a run is, and when it is done at its pace."""

import pytest

from swarmnet.run.progress import RoundPace, duration_text, percent, planned_rounds, progress_text
from swarmnet.run.schema import Sync


def test_the_plan_is_the_owners_order_or_else_the_schedule_of_the_learning_rate():
    sync = Sync(decay_rounds=3000)
    assert planned_rounds(sync, None) == 3000
    assert planned_rounds(sync, 479) == 480, "round 0 is one of them"


def test_the_time_left_follows_the_pace_of_the_last_minutes():
    pace = RoundPace()
    for second in range(101):
        pace.add(float(second), second // 2)
    assert pace.seconds_left(100.0, 3000) == pytest.approx((3000 - 50) * 2.0)
    for second in range(101, 1400):  # Four times as fast from now on: the slow start is forgotten.
        pace.add(float(second), 50 + 2 * (second - 100))
    assert pace.seconds_left(1399.0, 3000) == pytest.approx((3000 - 2648) * 0.5, rel=0.01)
    assert pace.seconds_left(1399.0, 2000) is None, "it is done"
    assert pace.seconds_left(2399.0, 3000) > 350, "a run that stands still takes longer"


def test_a_pace_is_not_told_too_early_and_begins_anew_after_a_lower_round():
    pace = RoundPace()
    assert pace.seconds_left(0.0, 10) is None
    pace.add(0.0, 5)
    pace.add(10.0, 7)
    assert pace.seconds_left(10.0, 100) is None, "10 s are too short"
    pace.add(30.0, 8)
    assert pace.seconds_left(30.0, 100) == pytest.approx(92 * 10.0)
    pace.add(31.0, 3)
    pace.add(32.0, None)
    assert pace.seconds_left(60.0, 100) is None


@pytest.mark.parametrize(
    ("round", "left", "text"),
    [
        (594, 250.0, "round 594 of 3,000 (20 %), about 4 min left at this pace"),
        (7, None, "round 7 of 3,000 (0.2 %)"),
        (0, None, "round 0 of 3,000 (0 %)"),
        (3000, None, "round 3,000, after the planned 3,000"),
    ],
)
def test_progress_is_one_sentence(round, left, text):
    assert progress_text(round, 3000, left) == text


def test_times_and_shares_are_short():
    texts = [duration_text(seconds) for seconds in (0, 59, 60, 11_100, 2 * 86400 + 4 * 3600)]
    assert texts == ["0 s", "59 s", "1 min", "3 h 5 min", "2 d 4 h"]
    assert [percent(share) for share in (0.0, 0.012, 0.0994, 0.0996, 1.0)] == [
        "0 %",
        "1.2 %",
        "9.9 %",
        "10 %",
        "100 %",
    ]
