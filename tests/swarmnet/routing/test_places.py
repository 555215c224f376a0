"""Places for microbatches on their way: who gets one, who does not, and that none is kept for nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.capacity import Booking, Load, earliest_start, truncate_bookings
from swarmnet.routing.reservation_table import (
    FIRST_SHUN_SECONDS,
    LATE_SECONDS,
    LONGEST_SECONDS,
    ReservationTable,
)
from swarmnet.run.path_rules import PathRules, begin, visit

RULES = PathRules.of(6, 1 / 3)
HEADER = visit(begin(RULES), 2, RULES)
ONE, OTHER = PeerId("one"), PeerId("other")


def key(number):
    return MicrobatchId(PeerId("origin"), number)


def places(slots=3):
    made = ReservationTable(slots, False)
    made.forward_seconds, made.backward_seconds = 1.0, 2.0
    return made


def ask(held, number, asker=ONE, arrival=1.0, wanted=None, firm=False, now=0.0):
    wanted = arrival if wanted is None else wanted
    return held.ask(key(number), asker, HEADER, arrival, wanted, 10.0, firm, now)


def test_a_place_is_given_from_the_moment_of_arrival_on_and_told_to_all():
    held = places()
    assert ask(held, 1, arrival=4.0) == 4.0
    assert held.load.bookings == (Booking(4.0, 4.0 + 3.0 + 10.0),)


def test_who_would_begin_later_than_asked_is_told_so_unless_it_is_firm():
    held = places(slots=1)
    assert ask(held, 1, arrival=1.0) == 1.0
    assert ask(held, 2, arrival=1.0) is None
    assert ask(held, 2, arrival=1.0, wanted=14.0) == 14.0
    assert ask(held, 3, OTHER, arrival=1.0, firm=True) == 27.0


def test_one_asker_gets_no_more_than_its_share_of_the_places():
    held = places()
    given_to_one = [ask(held, n, firm=True) for n in range(40)]
    assert sum(start is not None for start in given_to_one) == held.most // 2
    assert ask(held, 50, OTHER, firm=True) is not None


def test_nobody_takes_anothers_place_or_one_for_what_is_here_already():
    held = places()
    assert ask(held, 1) is not None
    assert ask(held, 1, OTHER) is None
    assert held.expects(key(1), ONE)
    assert not held.expects(key(1), OTHER)
    held.came(key(1), ONE, HEADER, 10.0, 1.0)
    assert ask(held, 1, firm=True) is None
    assert not held.expects(key(1), ONE)


def test_asked_again_by_the_same_peer_the_place_moves():
    held = places(slots=1)
    assert ask(held, 1, arrival=1.0) == 1.0
    assert ask(held, 1, arrival=5.0) == 5.0
    assert len(held.held) == 1


def test_bodies_that_never_come_free_their_places_and_cost_the_asker_its_places_for_longer_each_time():
    held, now = places(), 0.0
    for times in range(3):
        assert ask(held, times, now=now) is not None
        now += 14.0 + LATE_SECONDS + 1
        assert held.lapse(now) == [key(times)]
        assert held.held == {}
        pause = FIRST_SHUN_SECONDS * 2**times
        assert ask(held, 10, now=now + pause - 0.1) is None
        assert ask(held, 10, OTHER, now=now) is not None
        assert held.end(key(10))
        now += pause
    assert ask(held, 20, now=now) is not None
    held.came(key(20), ONE, HEADER, 10.0, now)
    assert held.lapse(now + 1000.0) == []
    held.end(key(20))


def test_the_places_of_a_peer_that_is_gone_are_free_and_what_came_from_it_stays():
    held = places()
    for number, asker in ((1, ONE), (2, ONE), (3, OTHER)):
        assert ask(held, number, asker, firm=True) is not None
    held.came(key(2), ONE, HEADER, 10.0, 1.0)
    assert held.gone(ONE, 2.0) == [key(1)]
    assert set(held.held) == {key(2), key(3)}
    assert ask(held, 4, firm=True, now=2.0) is None, "it is not trusted at once, should it be back"


def test_nothing_is_booked_for_ever():
    held = places()
    assert ask(held, 1, arrival=LONGEST_SECONDS + 1, firm=True) is None
    held.ask(key(2), ONE, HEADER, 1.0, 1.0, 1e9, True, 0.0)
    assert held.held[key(2)].booking.release <= 1.0 + LONGEST_SECONDS


def test_a_forward_that_begins_late_moves_the_end_and_an_early_one_does_not():
    held = places()
    ask(held, 1, arrival=4.0)
    held.begins(key(1), 6.0)
    assert held.held[key(1)].booking == Booking(6.0, 19.0)
    held.begins(key(1), 5.0)
    assert held.held[key(1)].booking == Booking(5.0, 19.0)
    held.answered_at(key(1), 30.0)
    assert held.held[key(1)].booking == Booking(5.0, 32.0)


BOOKED = st.lists(st.tuples(st.floats(0, 50), st.floats(1, 30)), max_size=12)


@given(BOOKED, st.integers(1, 6), st.integers(1, 6), st.floats(0, 60), st.floats(1, 40))
def test_a_shortened_list_promises_no_earlier_start(drawn, memory, most, arrival, seconds):
    load = Load(memory, 0.0, 0.0, tuple(Booking(start, start + length) for start, length in drawn))
    short = truncate_bookings(load, most)
    assert len(short.bookings) <= most
    if len(load.bookings) - most < memory:  # Else a place is told of, as there is one in the end.
        now = 0.0
        assert earliest_start(short, arrival, seconds, now) >= earliest_start(load, arrival, seconds, now)


class AnyStory(RuleBasedStateMachine):
    """Whatever is asked, said and kept silent, places stay within bounds and in the end none is left."""

    def __init__(self):
        super().__init__()
        self.places, self.now = places(slots=2), 0.0
        self.here = set()

    @rule(
        number=st.integers(0, 30), asker=st.sampled_from([ONE, OTHER]), arrival=st.floats(0, 900),
        wanted=st.floats(0, 900), rest=st.floats(0, 900), firm=st.booleans(),
    )  # fmt: skip
    def ask(self, number, asker, arrival, wanted, rest, firm):
        now = self.now
        if key(number) not in self.here:
            start = self.places.ask(key(number), asker, HEADER, now + arrival, now + wanted, rest, firm, now)
            assert start is None or start >= now + arrival

    @rule(number=st.integers(0, 30), sender=st.sampled_from([ONE, OTHER]))
    def come(self, number, sender):
        self.places.came(key(number), sender, HEADER, 5.0, self.now)
        self.here.add(key(number))

    @rule(number=st.integers(0, 30), later=st.floats(0, 5))
    def begin(self, number, later):
        self.places.begins(key(number), self.now + later)

    @rule(number=st.integers(0, 30))
    def end(self, number):
        self.places.end(key(number))
        self.here.discard(key(number))

    @rule(asker=st.sampled_from([ONE, OTHER]))
    def go(self, asker):
        self.places.gone(asker, self.now)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds):
        self.now += seconds
        self.places.lapse(self.now)

    @invariant()
    def bounded(self):
        expected = [place for place in self.places.held.values() if not place.came]
        assert len(expected) <= self.places.most
        assert {k for k, place in self.places.held.items() if place.came} == self.here

    def teardown(self):
        for number in list(self.here):
            self.places.end(number)
        self.places.lapse(self.now + 4 * LONGEST_SECONDS)
        assert self.places.held == {}


AnyStory.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestAnyStory = AnyStory.TestCase


@pytest.mark.parametrize("slots", [1, 3, 32, 1000])
def test_there_is_a_bound_whatever_the_memory(slots):
    held = ReservationTable(slots, False)
    for number in range(300):
        held.ask(key(number), PeerId(str(number)), HEADER, 1.0, 1.0, 1.0, True, 0.0)
    assert len(held.held) == held.most <= 64
