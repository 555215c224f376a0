"""Pulling what others hold, on hand-set time: asked of one, then of the next, then given up. What it shows of
their uploads bounds false claims, with liars in both directions."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import Reference, RequestContributions
from swarmnet.rounds.fetch_scheduler import MAX_ASKS, MAX_OF_ONE, MAX_PULLS, PULL_SECONDS, FetchScheduler
from swarmnet.rounds.result_table import class_of
from swarmnet.rounds.upload_meter import (
    FAST,
    MAX_REPORTS,
    REMEMBERED_SECONDS,
    REPORT_BYTES,
    SAMPLES,
    SLOW_SECONDS,
    UploadMeter,
    measured_uploads,
    read_reports,
    short_tag,
)

A, B, MAKER = PeerId("a"), PeerId("b"), PeerId("maker")


def reference(number: int, round: int = 0) -> Reference:
    return Reference(round, MAKER, ContributionId(number.to_bytes(16, "big")), 100)


ONE, TWO = reference(1), reference(2)


def test_what_is_offered_is_asked_for_once():
    pulls = FetchScheduler(PeerId("me"))
    assert pulls.offered(A, [ONE, TWO], 0.0) == [RequestContributions(A, (ONE.id, TWO.id))]
    assert pulls.offered(B, [ONE], 0.1) == []
    assert pulls.offered(A, [], 0.1) == []
    assert len(pulls) == 2
    assert pulls.of_round(0)
    assert not pulls.of_round(1)


def test_what_does_not_come_is_asked_of_the_next_holder_in_turn():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [ONE], 0.0)
    pulls.offered(B, [ONE], 0.1)
    assert pulls.next_deadline() == PULL_SECONDS
    assert pulls.again(0.9 * PULL_SECONDS) == []
    assert pulls.again(PULL_SECONDS) == [RequestContributions(B, (ONE.id,))]
    assert pulls.again(2 * PULL_SECONDS) == [RequestContributions(A, (ONE.id,))]
    pulls.arrived(ONE, A, 2.5)
    assert pulls.next_deadline() == float("inf")
    pulls.arrived(ONE, A, 3.0)


def test_when_the_asked_holder_leaves_the_next_is_asked_at_once():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [ONE, TWO], 0.0)
    pulls.offered(B, [ONE], 0.0)
    pulls.left(A, 0.5)
    assert len(pulls) == 1, "nobody else offered the other"
    assert pulls.again(0.5) == [RequestContributions(B, (ONE.id,))]


def test_settled_rounds_are_forgotten():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [reference(n, round=n) for n in range(5)], 0.0)
    pulls.forget_until(2, 1.0)
    assert [pulls.of_round(n) for n in range(5)] == [False, False, False, True, True]


def test_what_nobody_gives_is_given_up_and_may_be_offered_again():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [ONE], 0.0)
    now, asked = 0.0, 1
    while len(pulls):
        now = pulls.next_deadline()
        asked += len(pulls.again(now))
    assert asked == MAX_ASKS
    assert pulls.offered(A, [ONE], now) == [RequestContributions(A, (ONE.id,))]


def test_names_without_end_are_not_remembered():
    pulls = FetchScheduler(PeerId("me"))
    for number, start in enumerate(range(0, 3 * MAX_PULLS, 500)):
        pulls.offered(PeerId(f"liar {number}"), [reference(n) for n in range(start, start + 500)], 0.0)
    assert len(pulls) == MAX_PULLS


@pytest.mark.parametrize("at_once", [500, 3 * MAX_PULLS])
def test_names_of_one_neighbour_alone_leave_room_for_those_of_the_others(at_once):
    pulls = FetchScheduler(PeerId("me"))
    for start in range(0, 3 * MAX_PULLS, at_once):
        pulls.offered(A, [reference(n) for n in range(start, start + at_once)], 0.0)
    assert len(pulls) == MAX_OF_ONE
    true = reference(10**9)
    assert pulls.offered(B, [true], 0.0) == [RequestContributions(B, (true.id,))]


def test_a_round_waits_for_a_name_of_one_neighbour_alone_no_longer_than_for_its_first_answer():
    pulls = FetchScheduler(PeerId("me"))
    pulls.offered(A, [ONE], 0.0)
    assert pulls.of_round(0)
    assert pulls.again(PULL_SECONDS) == [RequestContributions(A, (ONE.id,))], "it is asked again all the same"
    assert not pulls.of_round(0)
    pulls.offered(B, [ONE], PULL_SECONDS + 0.1)
    assert pulls.of_round(0), "somebody else has it, too"
    pulls.arrived(ONE, B, 2.0)
    assert not pulls.of_round(0)


@given(st.integers(0, 2**32))
def test_whatever_an_honest_holder_offers_comes_in_the_end_though_messages_are_lost(seed):
    chance, pulls, now = Random(seed), FetchScheduler(PeerId("me")), 0.0
    wanted = {reference(n).id: reference(n) for n in range(10)}
    lost = 0.3
    for _ in range(1000):
        if not wanted:
            break
        if chance.random() < 0.2:
            pulls.offered(chance.choice([A, B]), [reference(99)], now)
            pulls.arrived(reference(99), B, now)
        offered = list(wanted.values()) if not len(pulls) else []
        for want in pulls.offered(A, offered, now) + pulls.again(now):
            for identity in want.ids:
                if identity in wanted and chance.random() > lost:
                    pulls.arrived(wanted.pop(identity), A, now)
        if len(pulls):
            assert pulls.next_deadline() > now, "it would spin"
            now = pulls.next_deadline()
    assert not wanted
    assert len(pulls) == 0


# -- uploads --------------------------------------------------------------------------------

GROUP = [PeerId(f"peer {number}") for number in range(9)]
CLAIM = 1.25e9
"""10 Gbit/s in bytes per second."""
LINE = 625_000
"""5 Mbit/s."""


def name(number: int) -> ContributionId:
    return ContributionId(number.to_bytes(16, "big"))


def meter_of(sender: PeerId, rate: float, transfers: int = SAMPLES, size: int = 10_000_000) -> UploadMeter:
    meter, now = UploadMeter(), 0.0
    for number in range(transfers):
        meter.requested(name(number), sender, now)
        now += size / rate
        meter.arrived(name(number), sender, size, now)
    return meter


def report(sender: PeerId, level: int) -> bytes:
    return short_tag(sender) + bytes([level])


def test_a_slow_sender_is_reported_after_some_transfers_to_the_nearest_power_below():
    now = 1000.0
    assert meter_of(A, LINE, SAMPLES - 1).reports(now) == b""
    assert read_reports(meter_of(A, LINE).reports(now)) == {short_tag(A): 19}
    assert 2**19 <= LINE < 2**20
    assert meter_of(A, LINE).reports(REMEMBERED_SECONDS + now) == b"", "it may have a better line by now"


def test_short_transfers_are_fast_and_one_fast_one_excuses_three_slow_ones():
    now = 1000.0
    assert read_reports(meter_of(A, LINE, size=int(LINE * SLOW_SECONDS) - 1).reports(now)) == {
        short_tag(A): FAST
    }
    meter = meter_of(A, LINE)
    meter.requested(name(99), A, now)
    meter.arrived(name(99), A, 100, now + 0.1)
    assert read_reports(meter.reports(now)) == {short_tag(A): FAST}


def test_transfers_that_overlap_share_the_line():
    meter = UploadMeter()
    for first in range(0, 4 * SAMPLES, 4):
        start = 100.0 * first
        for number in range(first, first + 4):
            meter.requested(name(number), A, start)
        for number in range(first, first + 4):
            meter.arrived(name(number), A, LINE * 5, start + 5.0 * (number - first + 1))
    assert read_reports(meter.reports(1500.0)) == {short_tag(A): 19}, "four in a row, each at the whole rate"


def test_what_another_sent_or_what_never_came_tells_nothing_in_favour_of_the_one_that_was_asked():
    meter = UploadMeter()
    for number in range(SAMPLES):
        meter.requested(name(number), A, 10.0 * number)
        meter.arrived(name(number), B, 10**9, 10.0 * number + SLOW_SECONDS)
    assert read_reports(meter.reports(100.0)) == {short_tag(A): 0}
    meter = UploadMeter()
    for number in range(SAMPLES):
        meter.requested(name(number), A, number)
        meter.requested(name(number), B, number + 0.1)  # A was not asked for long.
        meter.left(B)
        meter.ended(name(number), number + 0.2)
    assert meter.reports(100.0) == b""


def test_downloads_measure_whom_they_ask():
    pulls, now = FetchScheduler(PeerId("me")), 0.0
    for number in range(SAMPLES):
        reference = Reference(number, A, name(number), 5 * LINE)
        pulls.offered(A, [reference], now)
        now += 5.0
        pulls.arrived(reference, A, now)
    assert read_reports(pulls.meter.reports(now)) == {short_tag(A): 19}


def test_a_peer_that_claims_a_fast_line_and_has_a_slow_one_is_soon_drawn_like_all():
    """Eight peers fetch its results at the same time, so each gets an eighth of its line."""
    reports = {peer: meter_of(A, LINE / 8).reports(1000.0) for peer in GROUP[:8]}
    measured = measured_uploads(frozenset(reports.items()))[short_tag(A)]
    assert LINE <= measured <= 2 * LINE
    assert class_of(CLAIM, measured, False).level == 0
    assert not class_of(CLAIM, measured, True).is_helper


def test_receivers_with_slow_lines_do_not_make_a_fast_sender_slow():
    reports = {peer: meter_of(A, 12.5e6, size=100_000_000).reports(1000.0) for peer in GROUP[:8]}
    assert class_of(CLAIM, measured_uploads(frozenset(reports.items()))[short_tag(A)], False).level == 3


@given(st.integers(1, 9), st.data())
def test_fewer_than_half_of_the_witnesses_cannot_move_the_bound_beyond_what_the_honest_measured(peers, data):
    liars = data.draw(st.integers(0, (peers - 1) // 2))
    honest = data.draw(st.lists(st.integers(0, 40), min_size=peers - liars, max_size=peers - liars))
    lies = data.draw(st.lists(st.integers(0, FAST), min_size=liars, max_size=liars))
    reports = {peer: report(A, level) for peer, level in zip(GROUP, honest + lies, strict=False)}
    measured = measured_uploads(frozenset(reports.items()))[short_tag(A)]
    assert peers * 2.0 ** (min(honest) + 1) <= measured <= peers * 2.0 ** (max(honest) + 1)


@pytest.mark.parametrize("level", [0, 19, FAST, 255])
def test_no_peer_reports_on_itself_and_half_of_two_cannot_slander(level):
    assert measured_uploads(frozenset({(A, report(A, level))})) == {}
    reports = {A: report(B, FAST), GROUP[0]: report(B, level)}
    assert measured_uploads(frozenset(reports.items()))[short_tag(B)] == inf


@given(st.binary(max_size=3 * MAX_REPORTS * REPORT_BYTES))
def test_any_bytes_are_read_as_some_reports(data):
    measured = measured_uploads(frozenset({(A, data)}))
    assert len(measured) <= len(data) // REPORT_BYTES
    assert all(up > 0 for up in measured.values())


def test_a_record_reports_on_so_many_peers_at_most_the_newest():
    meter = UploadMeter()
    for peer in range(2 * MAX_REPORTS):
        for number in range(SAMPLES):
            meter.requested(name(number), PeerId(f"{peer:03}"), 10.0 * peer)
            meter.arrived(name(number), PeerId(f"{peer:03}"), 100, 10.0 * peer + 0.1)
    reports = meter.reports(700.0)
    newest = {short_tag(PeerId(f"{peer:03}")) for peer in range(MAX_REPORTS, 2 * MAX_REPORTS)}
    assert read_reports(reports).keys() == newest
