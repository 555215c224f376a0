"""Hours, idleness and the share of the upload are decided without a clock: what they decide, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.resources.idleness import Idleness, IdleRules
from swarmnet.resources.upload_limiter import BURST_SECONDS, UploadShare
from swarmnet.resources.working_hours import DAY_MINUTES, HoursError, parse

CONTROL, GRADIENT, ACTIVATION, BULK = range(4)


def at(text):
    hour, minute = text.split(":")
    return int(hour) * 60 + int(minute)


@pytest.mark.parametrize(
    ("hours", "allowed", "forbidden"),
    [
        ("22:00-08:00", ["22:00", "23:59", "0:00", "7:59"], ["8:00", "12:00", "21:59"]),
        ("08:30-17:00", ["8:30", "16:59"], ["8:29", "17:00", "0:00"]),
        ("0:00-6:00, 20:00-24:00", ["0:00", "5:59", "20:00", "23:59"], ["6:00", "19:59"]),
        ("00:00-24:00", ["0:00", "12:00", "23:59"], []),
    ],
)
def test_hours_allow_what_they_say_also_over_midnight(hours, allowed, forbidden):
    if hours == "00:00-24:00":
        with pytest.raises(HoursError, match="leave `hours` out"):
            parse(hours)
        return
    found = parse(hours)
    assert [text for text in allowed if not found.allow(at(text))] == []
    assert [text for text in forbidden if found.allow(at(text))] == []


@pytest.mark.parametrize("text", ["", "22-8", "22:00", "25:00-3:00", "22:60-3:00", "8:00-8:00", "a:b-c:d"])
def test_what_are_no_hours_is_refused_with_an_example(text):
    with pytest.raises(HoursError, match=r"such as 22:00-08:00|no time|begins when it ends"):
        parse(text)


@given(
    st.integers(0, DAY_MINUTES - 1), st.integers(0, DAY_MINUTES - 1), st.integers(0, DAY_MINUTES - 1)
)  # fmt: skip
def test_hours_say_truly_when_they_change(first, stop, now):
    if first == stop:
        return
    hours = parse(f"{first // 60}:{first % 60:02}-{stop // 60}:{stop % 60:02}")
    wait = hours.until(now)
    assert hours.allow((now + wait) % DAY_MINUTES) != hours.allow(now)
    assert all(hours.allow((now + early) % DAY_MINUTES) == hours.allow(now) for early in range(wait))


def test_a_machine_in_use_is_noticed_in_seconds_and_comes_back_after_minutes():
    idleness = Idleness(IdleRules(busy_seconds=5, quiet_seconds=120))
    assert all(idleness.look(2.0, None, now) for now in range(5)), "patient for a moment"
    assert not idleness.look(2.0, None, 5)
    assert not any(idleness.look(0.0, None, 6 + now) for now in range(120))
    assert idleness.look(0.0, None, 126)


def test_a_short_burst_does_not_pause_and_a_short_rest_does_not_bring_it_back():
    idleness = Idleness(IdleRules(busy_seconds=5, quiet_seconds=120))
    for now in range(0, 40, 8):  # Four seconds of work, four of rest.
        assert idleness.look(3.0, None, now)
        assert idleness.look(3.0, None, now + 4)
        assert idleness.look(0.1, None, now + 5)
    idleness.look(3.0, None, 100)
    assert not idleness.look(3.0, None, 105)
    for now in range(110, 1000, 60):  # A minute of rest, then a level of the game.
        assert not idleness.look(0.1, None, now)
        assert not idleness.look(3.0, None, now + 59)


def test_a_gpu_in_use_by_others_pauses_as_well():
    idleness = Idleness(IdleRules(busy_seconds=5))
    idleness.look(0.0, 0.9, 0)
    assert not idleness.look(0.0, 0.9, 5)


def play(share, asks, until):
    """Ask at given times; when each was granted."""
    granted, tickets, now = {}, {}, 0.0
    asks = sorted(asks, key=lambda ask: ask[0])
    while now <= until and (asks or share.next_grant(now) < float("inf")):
        while asks and asks[0][0] <= now:
            _, name, size, priority = asks.pop(0)
            tickets[share.ask(size, priority, now)] = name
        granted.update({tickets[ticket]: now for ticket in share.granted(now)})
        now = min(share.next_grant(now), asks[0][0] if asks else float("inf"))
    return granted


def test_the_rate_holds_over_any_second():
    share = UploadShare(1000.0, 0.0)
    granted = play(share, [(0.0, number, 100, number % 4) for number in range(60)], 10.0)
    times = sorted(granted.values())
    assert len(times) == 60
    for start in times:
        in_second = sum(start <= time < start + 1.0 for time in times) * 100
        assert in_second <= 1000 * (1 + BURST_SECONDS) + 100


def test_control_never_waits_for_more_than_what_is_under_way_and_bulk_still_trickles():
    bulk = [(0.0, ("bulk", number), 100, BULK) for number in range(4)]
    activations = [(0.1 * number, ("activation", number), 100, ACTIVATION) for number in range(60)]
    control = [(0.05 * number, ("control", number), 10, CONTROL) for number in range(100)]
    granted = play(UploadShare(1000.0, 0.0), [*bulk, *control, *activations], 20.0)
    late = max(granted["control", number] - 0.05 * number for number in range(100))
    assert late <= 0.1 + 1e-3, "one activation"
    assert granted["bulk", 3] < 2.0, "the line is full for six seconds, bulk gets through"


def test_bulk_is_slowed_before_activations_and_those_before_gradients():
    share = UploadShare(1000.0, 0.0)
    names = ("control", "gradient", "activation", "bulk")
    granted = play(share, [(0.0, names[p], 150, p) for p in reversed(range(4))], 2.0)
    assert sorted(granted, key=granted.get) == ["control", "gradient", "activation", "bulk"]


def test_a_withdrawn_piece_takes_nothing_of_the_rate():
    share = UploadShare(1000.0, 0.0)
    first, gone, last = (share.ask(100, CONTROL, 0.0) for _ in range(3))
    share.withdraw(gone)
    assert share.granted(0.0) == [first]
    assert share.next_grant(0.0) == pytest.approx(0.001), "a byte more than nothing"
    assert share.granted(0.001) == [last]


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 5000), st.integers(0, 3)), max_size=30))
def test_every_piece_gets_its_turn_in_time(asks):
    share = UploadShare(10_000.0, 0.0)
    numbered = [(when, number, size, priority) for number, (when, size, priority) in enumerate(asks)]
    total = sum(size for _, size, _ in asks) / 10_000.0
    granted = play(share, numbered, 5.0 + total + 0.1)
    assert len(granted) == len(asks)


def test_another_rate_holds_at_once_also_for_what_waits():
    share = UploadShare(1000.0, 0.0)
    share.ask(10_000, 2, 0.0)
    ticket = share.ask(10_000, 2, 0.0)
    assert share.granted(0.0) == [0]
    assert share.granted(1.0) == []
    share.change_rate(100_000.0, 1.0)
    assert share.next_grant(1.0) < 1.1
    assert share.granted(1.1) == [ticket]
    share.change_rate(1000.0, 1.1)
    late = share.ask(1, 0, 1.1)
    assert share.granted(1.2) == [late], "what was overdrawn at the old rate is forgiven"
    with pytest.raises(ValueError, match="is no rate"):
        share.change_rate(0.0, 2.0)
