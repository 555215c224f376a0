"""Whom experts are asked of, on hand-set time: every way that a call can go, and random walks."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.expert_answers import Asked, ExpertAnswers
from swarmnet.pipeline.expert_calls import (
    CallId,
    DeclineArrived,
    ExpertCalls,
    GiveUp,
    HolderLost,
    Look,
    SaidArrived,
    SendCall,
    TakeAnswer,
    Wanted,
)
from swarmnet.pipeline.ledger import Ledger
from swarmnet.pipeline.machine import MOST_ATTEMPTS, RETRY_SECONDS
from swarmnet.pipeline.timeouts import FIRST_DEADLINE_SECONDS, LONGEST_FIRST_SECONDS

X, Y, ME = PeerId("X"), PeerId("Y"), PeerId("me")
KEY = MicrobatchId(ME, 1)
CALL = CallId(KEY, 3, 0, False)
OTHER = CallId(KEY, 3, 1, False)


def machine(*holders, groups=2):
    held = {0: list(holders), 1: [Y]}
    return ExpertCalls(groups, Random(1), lambda group: held[group]), held


def in_flight(calls):
    return sum(estimate.in_flight for router in calls.routers for estimate in router.peers.values())


def test_a_call_goes_to_a_holder_and_its_answer_to_the_microbatch():
    calls, _ = machine(X)
    assert calls.handle(Wanted(CALL), 0.0) == [SendCall(CALL, X, 1, FIRST_DEADLINE_SECONDS)]
    assert calls.handle(Wanted(OTHER), 0.0) == [SendCall(OTHER, Y, 2, FIRST_DEADLINE_SECONDS)]
    assert not calls.expects(Y, CALL, 1)
    assert calls.handle(SaidArrived(X, CALL, 1), 0.5) == [TakeAnswer(CALL)]
    assert calls.handle(SaidArrived(X, CALL, 1), 0.6) == []
    assert (calls.late_answers, calls.under_way, in_flight(calls)) == (1, 1, 1)
    assert calls.answers[0].usual == 0.5


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (DeclineArrived(X, CALL, 1, "busy"), "busy"),
        (DeclineArrived(X, CALL, 1, "not_ready"), "not_ready"),
        (HolderLost(X), "lost"),
        (Look(), "deadline"),
    ],
)
def test_whoever_does_not_do_it_is_gone_around(event, code):
    calls, held = machine(X)
    calls.handle(Wanted(CALL), 0.0)
    held[0] = [X, Y] if code == "deadline" else [Y, X]
    now = FIRST_DEADLINE_SECONDS if code == "deadline" else 0.1
    (sent,) = calls.handle(event, now)
    assert (sent.call, sent.peer, sent.attempt) == (CALL, Y, 2)
    assert calls.rerouted == {code: 1}
    assert in_flight(calls) == 1
    if code == "deadline":  # It may come yet.
        assert calls.handle(SaidArrived(X, CALL, 1), now + 1.0) == [TakeAnswer(CALL)]
        assert in_flight(calls) == 0


def test_a_call_without_a_holder_is_given_up_at_once_and_one_that_all_fail_after_some_attempts():
    calls, held = machine()
    assert calls.missing() == {0}
    assert calls.handle(Wanted(CALL), 0.0) == [GiveUp(CALL)]
    held[0] = [X]
    now, effects = 0.0, calls.handle(Wanted(CALL), 0.0)
    tries = 0
    while effects != [GiveUp(CALL)]:
        tries += any(isinstance(effect, SendCall) for effect in effects)
        now = calls.next_deadline()
        assert now < float("inf")
        effects = calls.handle(Look(), now)
    assert 1 <= tries <= MOST_ATTEMPTS
    assert (calls.under_way, in_flight(calls), calls.given_up) == (0, 0, 2)


def test_a_call_for_which_nobody_has_room_waits_until_somebody_has():
    calls, _ = machine(X)
    second = CallId(MicrobatchId(ME, 2), 3, 0, False)
    calls.handle(Wanted(CALL), 0.0)
    assert calls.handle(Wanted(second), 0.0) == []
    assert calls.handle(SaidArrived(X, CALL, 1), 0.5) == [
        TakeAnswer(CALL), SendCall(second, X, 2, pytest.approx(2.5))
    ]


def test_an_answer_to_what_the_call_was_before_is_not_taken_for_one_to_what_it_is_now():
    calls, held = machine(X)
    calls.handle(Wanted(CALL), 0.0)
    held[0] = [X, Y]
    calls.handle(Look(), FIRST_DEADLINE_SECONDS)
    calls.handle(SaidArrived(Y, CALL, 2), 20.5)
    held[0] = [X]
    (again,) = calls.handle(Wanted(CALL), 30.0)  # Its layer was routed anew, without another group.
    assert again.peer == X
    assert not calls.expects(X, CALL, 1)
    assert calls.expects(X, CALL, again.attempt)


def test_a_microbatch_that_nobody_wants_leaves_nothing_behind():
    calls, _ = machine(X)
    calls.handle(Wanted(CALL), 0.0)
    calls.handle(Wanted(OTHER), 0.0)
    calls.drop(KEY)
    assert (calls.under_way, in_flight(calls), calls.next_deadline()) == (0, 0, float("inf"))


def test_a_holder_takes_what_it_has_room_for_and_adds_each_gradient_once():
    answers = ExpertAnswers(2, Ledger())
    first, second = Asked(X, KEY, 3, True), Asked(Y, KEY, 3, True)
    assert answers.take(first, 1) == "compute"
    assert answers.adds(first)
    assert answers.take(first, 4) == "wait", "it is under way, and answers the newest attempt"
    assert answers.take(second, 1) == "compute", "another's is another's, whatever it calls it"
    assert answers.take(Asked(X, KEY, 2, True), 1) == "busy"
    assert answers.grant(X) == 1
    assert answers.done(first, 8) == 4
    assert answers.take(first, 5) == "compute"
    assert not answers.adds(first), "it is computed again, and adds nothing"
    assert answers.done(first, None) == 5
    ledger = answers.ledger
    assert (ledger.committed, ledger.tokens, ledger.repeated, ledger.refused) == (1, 8, 1, 1)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_however_it_goes_every_call_ends_once_and_nobody_is_thought_busier_than_it_is(data):
    held = {0: [X, Y], 1: [Y]}
    calls = ExpertCalls(2, Random(2), lambda group: held[group])
    now, wanted, ended, sent = 0.0, set(), [], []

    def took(effects):
        for effect in effects:
            if isinstance(effect, SendCall):
                sent.append(effect)
            else:
                ended.append(effect.call)

    for number in range(data.draw(st.integers(1, 12))):
        call = CallId(MicrobatchId(ME, number), 0, number % 2, False)
        wanted.add(call)
        took(calls.handle(Wanted(call), now))
        for _ in range(data.draw(st.integers(0, 3))):
            now += data.draw(st.floats(0.0, 30.0))
            match data.draw(st.sampled_from(["said", "declined", "lost", "look"])):
                case "said" if sent:
                    one = data.draw(st.sampled_from(sent))
                    took(calls.handle(SaidArrived(one.peer, one.call, one.attempt), now))
                case "declined" if sent:
                    one = data.draw(st.sampled_from(sent))
                    code = data.draw(st.sampled_from(["busy", "not_finite"]))
                    took(calls.handle(DeclineArrived(one.peer, one.call, one.attempt, code), now))
                case "lost":
                    took(calls.handle(HolderLost(data.draw(st.sampled_from([X, Y]))), now))
                case _:
                    took(calls.handle(Look(), now))
    for _ in range(int(MOST_ATTEMPTS * LONGEST_FIRST_SECONDS / RETRY_SECONDS) + 100):
        if not calls.under_way:
            break
        now = max(now, calls.next_deadline())
        took(calls.handle(Look(), now))
    assert not calls.under_way
    assert sorted(ended, key=str) == sorted(wanted, key=str)
    assert in_flight(calls) == 0
