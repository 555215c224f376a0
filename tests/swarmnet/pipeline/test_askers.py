"""Who waits for a microbatch's answer, who called it off, and who is blamed for a bad one."""

from __future__ import annotations

import pytest
from microbatches import KEY, UP, UP2, X, Y, machine, waiting

from swarmnet.identifiers import PeerId
from swarmnet.pipeline.events import (
    ActArrived,
    BackwardDone,
    CancelArrived,
    ComputeBackward,
    ComputeFailed,
    ComputeForward,
    Forget,
    GradArrived,
    NackArrived,
    PeerLost,
    SendAct,
    SendBusy,
    SendCancel,
    SendGrad,
    SendNack,
)
from swarmnet.pipeline.pipeline import MAX_ASKERS


def test_an_asker_that_gives_up_takes_nothing_from_another():
    pipeline, act = waiting(X)
    pipeline.handle(ActArrived(UP2, KEY, 5, 60.0), 1.1)
    assert pipeline.handle(CancelArrived(UP2, KEY, 4), 1.2) == [], "an older attempt"
    assert pipeline.handle(CancelArrived(UP, KEY, 1), 1.2) == []
    assert pipeline.handle(PeerLost(UP), 1.3) == []
    assert pipeline.handle(CancelArrived(UP2, KEY, 5), 1.4) == [SendCancel(KEY, act.peer, 1), Forget(KEY)]


def test_many_askers_take_the_answer_from_nobody_who_asked_before():
    pipeline, _ = waiting(X)
    for number in range(1, MAX_ASKERS):
        assert pipeline.handle(ActArrived(PeerId(f"{number}"), KEY, 1, 60.0), 1.1) == []
    assert pipeline.handle(ActArrived(UP2, KEY, 5, 60.0), 1.2) == [SendBusy(KEY, UP2, 5)]
    assert UP in pipeline.jobs[KEY].above
    pipeline.handle(GradArrived(X, KEY, 1), 1.3)
    pipeline.handle(BackwardDone(KEY, 32), 1.4)
    assert pipeline.handle(ActArrived(UP2, KEY, 6, 60.0), 1.5) == [SendGrad(KEY, UP2, 6)], "it is there"


def test_a_word_that_overtakes_the_body_it_calls_off_saves_its_computation():
    pipeline = machine(X)
    assert pipeline.handle(CancelArrived(UP, KEY, 2), 0.0) == []
    (nack,) = pipeline.handle(ActArrived(UP, KEY, 2, 60.0), 0.1)
    assert isinstance(nack, SendNack)
    assert (nack.code, nack.attempt) == ("cancelled", 2)
    assert not pipeline.jobs
    assert pipeline.handle(ActArrived(UP, KEY, 2, 60.0), 0.2) == [ComputeForward(KEY)], "asked anew"


@pytest.mark.parametrize("attempt", [1, 5])
def test_a_second_askers_word_may_overtake_its_body_too(attempt):
    pipeline, act = waiting(X)
    assert pipeline.handle(CancelArrived(UP2, KEY, attempt), 1.1) == []
    (nack,) = pipeline.handle(ActArrived(UP2, KEY, attempt, 60.0), 1.2)
    assert isinstance(nack, SendNack)
    assert pipeline.handle(CancelArrived(UP, KEY, 1), 1.4) == [SendCancel(KEY, act.peer, 1), Forget(KEY)]


def test_who_is_told_that_its_attempt_was_called_off_blames_nobody():
    pipeline, act = waiting(X, Y)
    (again,) = pipeline.handle(NackArrived(act.peer, KEY, 1, "cancelled"), 1.1)
    assert isinstance(again, SendAct)
    assert pipeline.router.is_usable(act.peer, 1.1)


def test_a_gradient_that_is_no_good_is_blamed_on_who_sent_it_and_asked_of_another():
    pipeline, act = waiting(X, Y)
    pipeline.handle(GradArrived(act.peer, KEY, 1), 1.5)
    (other,) = pipeline.handle(ComputeFailed(KEY, "malformed", "inf", again=True), 1.6)
    assert not pipeline.router.is_usable(act.peer, 1.7)
    assert isinstance(other, SendAct)
    assert other.peer == ({X, Y} - {act.peer}).pop()
    assert pipeline.ledger.rerouted == {"malformed": 1}
    assert pipeline.answers.usual is None, "it was no answer"
    assert pipeline.handle(GradArrived(act.peer, KEY, 1), 1.7) == [], "nor is it asked for another"
    assert pipeline.handle(GradArrived(other.peer, KEY, 2), 1.8) == [ComputeBackward(KEY)]
    assert pipeline.handle(BackwardDone(KEY, 32), 1.9) == [SendGrad(KEY, UP, 1)]
    assert pipeline.answers.usual == pytest.approx(1.8 - 1.6)


def test_nobody_below_is_blamed_for_a_backward_that_fails_here():
    """It may be what came from above."""
    pipeline, act = waiting(X, Y)
    pipeline.handle(GradArrived(act.peer, KEY, 1), 1.5)
    effects = pipeline.handle(ComputeFailed(KEY, "not_finite", "inf"), 1.6)
    assert effects == [SendNack(KEY, UP, 1, "not_finite", "inf"), Forget(KEY)]
    assert pipeline.router.is_usable(act.peer, 1.7)
