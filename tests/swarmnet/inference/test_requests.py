"""The way of a visitor's requests through the stages, decided without peers:
swarmnet/inference/inference_client.py."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.inference.inference_client import (
    ASKED_AT_ONCE,
    BUSY,
    FIRST_DEADLINE_SECONDS,
    LEAVE_OUT_SECONDS,
    MALFORMED,
    MAX_REFUSALS,
    NO_ROUND,
    NOT_READY,
    Impossible,
    Missing,
    Pins,
    RequestFinished,
    Requests,
    SendRequest,
)
from swarmnet.run.path_rules import PathRules

PEERS = {"a": 0, "b": 1, "c": 1, "d": 2}


def requests(rules=None, without=()):
    made = Requests(rules or PathRules(3), Random(1), 0.0)
    for name, stage in PEERS.items():
        if name not in without:
            made.reached(PeerId(name), stage, 0.0)
    return made


def asks(effects):
    return [effect for effect in effects if isinstance(effect, SendRequest)]


def answer(made, ask, now, round=5):
    return made.answered(ask.request, ask.peer, ask.attempt, round, now)


def decline(made, ask, now, code=BUSY):
    return made.declined(ask.request, ask.peer, ask.attempt, code, "why", now)


def through_stage_0(made, key=1, now=0.0, pins=None):
    (ask,) = asks(made.start(key, {} if pins is None else pins, now))
    (ask,) = asks(answer(made, ask, now))
    return ask


def test_a_request_visits_the_stages_in_order_and_keeps_to_the_weights_it_began_with():
    made, pins = requests(), Pins()
    effects, seen = made.start(1, pins, 0.0), []
    for stage in range(3):
        (ask,) = effects
        assert (ask.stage, ask.round) == (stage, -1)
        seen.append(PEERS[ask.peer])
        effects = answer(made, ask, float(stage), round=10 + stage)
    assert effects == [RequestFinished(1, (0, 1, 2))]
    assert (seen, len(made)) == ([0, 1, 2], 0)
    assert pins == {0: 10, 1: 11, 2: 12}
    (ask,) = made.start(2, pins, 5.0)
    assert ask.round == 10


def test_requests_spread_over_the_peers_of_a_stage_and_a_peer_gets_no_more_than_it_takes():
    made = requests()
    first = [ask for key in range(1, 20) for ask in asks(made.start(key, {}, 0.0))]
    assert len(first) == ASKED_AT_ONCE, "stage 0 has one peer"
    second = [ask for ask in first for ask in asks(answer(made, ask, 0.1)) if ask.stage == 1]
    assert sorted(ask.peer for ask in second) == ["b"] * 2 + ["c"] * 2


def test_a_silent_peer_is_given_up_at_the_deadline_and_its_late_answer_changes_nothing():
    made = requests()
    ask = through_stage_0(made)
    assert made.next_deadline() == FIRST_DEADLINE_SECONDS
    assert not asks(made.tick(FIRST_DEADLINE_SECONDS - 0.1))
    (again,) = asks(made.tick(FIRST_DEADLINE_SECONDS))
    assert {ask.peer, again.peer} == {"b", "c"}
    assert answer(made, ask, 16.0) == []
    (last,) = asks(answer(made, again, 16.0))
    assert last.stage == 2


def test_a_stage_whose_peers_are_slow_is_busy_and_not_missing_and_is_waited_for_longer():
    made = Requests(PathRules(3), Random(0), 0.0)
    for number, peer in enumerate("abc"):
        made.reached(PeerId(peer), number, 0.0)
    (ask,) = asks(made.start(1, {}, 0.0))
    (ask,) = asks(answer(made, ask, 0.1))
    waited, effects, now = [], [], 0.1
    while len(waited) < 3 and now < 600.0:
        now = max(now, made.next_deadline())
        for effect in made.tick(now):
            (waited if isinstance(effect, SendRequest) else effects).append(effect)
    assert effects[0] == Missing((1,), busy=(1,))
    assert [one.deadline_seconds for one in waited] == sorted(one.deadline_seconds for one in waited)
    effects = made.lost(PeerId("b"), now)
    assert Missing((1,)) in effects, "now there is none"


def test_the_death_of_a_peer_is_a_new_question_to_another_at_once():
    made = requests()
    ask = through_stage_0(made)
    (again,) = asks(made.lost(ask.peer, 1.0))
    assert (again.stage, again.attempt) == (1, ask.attempt + 1)
    assert again.peer != ask.peer


@pytest.mark.parametrize(("code", "least"), [(BUSY, 0.1), (NOT_READY, 0.7)])
def test_a_peer_that_refuses_for_now_is_routed_around_and_asked_again_later(code, least):
    made = requests()
    ask = through_stage_0(made)
    (other,) = asks(decline(made, ask, 1.0, code))
    assert other.peer != ask.peer
    assert decline(made, other, 1.0, code) == []
    when = made.next_deadline()
    assert 1.0 + least < when < 3.0
    assert len(asks(made.tick(when))) == 1


def test_when_nobody_holds_the_round_any_more_the_newest_is_taken():
    made, pins = requests(), {1: 5}
    ask = through_stage_0(made, pins=pins)
    assert ask.round == 5
    (other,) = asks(decline(made, ask, 1.0, NO_ROUND))
    assert (other.peer != ask.peer, other.round) == (True, 5)
    (newest,) = asks(decline(made, other, 1.0, NO_ROUND))
    assert newest.round == -1
    answer(made, newest, 1.0, round=9)
    assert pins[1] == 9


def test_the_only_holder_of_the_round_falls_silent_and_the_newest_is_taken():
    made, pins = requests(), Pins()
    ask = through_stage_0(made, pins=pins)
    holder = ask.peer
    (ask,) = asks(answer(made, ask, 0.0))
    answer(made, ask, 0.0)
    (ask,) = asks(made.start(2, pins, 1.0))
    now, asked = 1.0, asks(answer(made, ask, 1.0))
    while not asked or asked[0].round != -1:
        if asked and asked[0].peer == holder:
            now, asked = made.next_deadline(), []
        asked = asks(made.tick(now)) if not asked else asks(decline(made, asked[0], now, NO_ROUND))
        if not asked:
            now = made.next_deadline()
        assert now < 60.0, "the silent one is waited for"
    assert asked[0].peer != holder


def test_a_pin_outlives_a_moment_without_peers():
    made, pins = requests(without="c"), {1: 5}
    through_stage_0(made, pins=pins)
    made.lost(PeerId("b"), 1.0)
    (ask,) = asks(made.reached(PeerId("b"), 1, 2.0))
    assert ask.round == 5


def test_a_request_that_several_peers_find_impossible_ends():
    made = requests()
    (ask,) = asks(made.start(1, {}, 0.0))
    now = 0.0
    for _ in range(MAX_REFUSALS - 1):
        assert not asks(decline(made, ask, now, MALFORMED)), "it rests after a failure"
        now = made.next_deadline()
        (ask,) = asks(made.tick(now))
    assert decline(made, ask, now, MALFORMED) == [Impossible(1, "why")]
    assert len(made) == 0


def test_a_dead_middle_stage_is_left_out_after_a_while_where_the_run_allows_it():
    made = requests(PathRules.of(3, 1 / 3))
    through_stage_0(made)
    made.lost(PeerId("c"), 1.0)
    assert made.lost(PeerId("b"), 1.0) == [Missing((1,))], "it may come back"
    assert made.next_deadline() == 1.0 + LEAVE_OUT_SECONDS
    missing, ask = sorted(
        made.tick(1.0 + LEAVE_OUT_SECONDS), key=lambda effect: isinstance(effect, SendRequest)
    )
    assert (missing, ask.stage, ask.path) == (Missing(()), 2, 2)
    assert answer(made, ask, 7.0) == [RequestFinished(1, (0, 2))]
    assert through_stage_0(made, 2, 8.0).stage == 2, "the next one does not wait"
    made.reached(PeerId("b"), 1, 9.0)
    ask = through_stage_0(made, 3, 9.0)
    assert (ask.stage, ask.path) == (1, 3)


def test_a_dead_stage_is_waited_for_where_it_may_not_be_left_out():
    made = requests()
    through_stage_0(made)
    made.lost(PeerId("c"), 1.0)
    assert made.lost(PeerId("b"), 1.0) == [Missing((1,))]
    assert made.tick(100.0) == []
    missing, ask = sorted(
        made.reached(PeerId("e"), 1, 101.0), key=lambda effect: isinstance(effect, SendRequest)
    )
    assert (missing, ask.peer) == (Missing(()), "e")


@pytest.mark.parametrize(("name", "stage"), [("a", 0), ("d", 2)])
def test_the_first_and_the_last_stage_are_never_left_out(name, stage):
    made = requests(PathRules.of(3, 1 / 3), without=name)
    effects = made.start(1, {}, 50.0)
    if stage == 2:
        (ask,) = asks(effects)
        effects = answer(made, ask, 50.0)
    assert effects == [Missing((stage,))]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["start", "answer", "decline", "lost", "reached", "wait", "drop"]),
        st.integers(0, 7), st.sampled_from([BUSY, NOT_READY, NO_ROUND, MALFORMED, "anything"]),
    ),
    max_size=80,
)  # fmt: skip


class World:
    """Peers p0 to p7, peer n of stage n % 5, and everything that is under way between them and a visitor."""

    def __init__(self, rules: PathRules, seed: int) -> None:
        self.rules = rules
        self.made = Requests(rules, Random(seed), 0.0)
        self.now = 0.0
        self.asked: dict[int, SendRequest] = {}
        self.alive: set[PeerId] = set()
        self.started = self.ended = 0

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, SendRequest):
                assert effect.peer in self.alive
                assert effect.request not in self.asked, "it is asked of one peer at a time"
                assert int(effect.peer[1:]) % 5 == effect.stage
                self.asked[effect.request] = effect
                assert sum(ask.peer == effect.peer for ask in self.asked.values()) <= ASKED_AT_ONCE
            elif isinstance(effect, RequestFinished):
                self.ended += 1
                assert list(effect.visited) == sorted(set(effect.visited))
                assert (effect.visited[0], effect.visited[-1]) == (0, self.rules.last)
                assert len(effect.visited) >= self.rules.shortest
            elif isinstance(effect, Impossible):
                self.ended += 1

    def wait(self):
        until = self.made.next_deadline()
        self.now = until if until != float("inf") else self.now + 1.0
        effects = self.made.tick(self.now)
        expects = self.made.expects
        self.asked = {k: a for k, a in self.asked.items() if expects(k, a.peer, a.attempt) == a}
        self.take(effects)

    def answer(self, ask):
        del self.asked[ask.request]
        self.take(answer(self.made, ask, self.now, max(0, ask.round)))

    def comes(self, peer, stage):
        if peer not in self.alive:
            self.alive.add(peer)
            self.take(self.made.reached(peer, stage, self.now))

    def goes(self, peer):
        self.alive.discard(peer)
        self.asked = {key: ask for key, ask in self.asked.items() if ask.peer != peer}
        self.take(self.made.lost(peer, self.now))

    def happens(self, kind, number, code):
        peer, under_way = PeerId(f"p{number}"), list(self.asked.values())
        ask = under_way[number % len(under_way)] if under_way else None
        self.now += 0.01
        if kind == "start":
            self.started += 1
            self.take(self.made.start(self.started, {}, self.now))
        elif kind == "reached":
            self.comes(peer, number % 5)
        elif kind == "lost":
            self.goes(peer)
        elif kind == "wait":
            self.wait()
        elif ask is not None and kind == "answer":
            self.answer(ask)
        elif ask is not None:
            del self.asked[ask.request]
            self.ended += kind == "drop"
            self.take(
                self.made.drop(ask.request, self.now)
                if kind == "drop"
                else decline(self.made, ask, self.now, code)
            )


@given(st.integers(0, 1), st.integers(0, 9), EVENTS)
def test_whatever_happens_paths_are_legal_peers_are_not_overrun_and_all_ends_when_peers_answer(
    skips, seed, events
):
    world = World(PathRules.of(5, 0.4 * skips), seed)
    for event in events:
        world.happens(*event)
    for number in range(5):
        world.comes(PeerId(f"p{number}"), number)
    for _ in range(40 * (world.started + 1)):
        for ask in list(world.asked.values()):
            world.answer(ask)
        if not world.asked and len(world.made):
            world.wait()
    assert len(world.made) == 0
    assert world.ended == world.started
