"""What a pipeline grants, how long it waits for whom, and that freed room is used at once."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.events import (
    ActArrived,
    BackwardDone,
    ForwardDone,
    GradArrived,
    MicrobatchCut,
    PipelineTick,
    SendAct,
    SendNack,
)
from swarmnet.pipeline.ledger import MicrobatchLedger
from swarmnet.pipeline.pipeline import MAX_ATTEMPTS, Pipeline
from swarmnet.pipeline.timeouts import (
    DEADLINE_FACTOR,
    FIRST_DEADLINE_SECONDS,
    LONGEST_FIRST_SECONDS,
    SHORTEST_DEADLINE_SECONDS,
    SLOWEST_FACTOR,
    AnswerTimes,
)
from swarmnet.routing.load_balancer import FIRST_SLOTS, Router

UP, UP2, X, Y = (PeerId(name) for name in ("up", "up2", "x", "y"))


def key(counter: int) -> MicrobatchId:
    return MicrobatchId(PeerId("origin"), counter)


def machine(*below: PeerId, slots: int = 8) -> Pipeline:
    return Pipeline(
        stages_below=1,
        router=Router(Random(1)),
        candidates=lambda _key, _tried: below,
        slots=slots,
        ledger=MicrobatchLedger(),
    )


def answered(pipeline: Pipeline, peer: PeerId, counter: int, now: float) -> None:
    """Its gradient comes and is added."""
    pipeline.handle(GradArrived(peer, key(counter), 1), now)
    pipeline.handle(BackwardDone(key(counter), 32), now)


def sent(pipeline: Pipeline, counter: int, now: float) -> SendAct:
    """Start an own microbatch and send it down."""
    pipeline.handle(MicrobatchCut(key(counter)), now)
    (act,) = pipeline.handle(ForwardDone(key(counter)), now)
    assert isinstance(act, SendAct)
    return act


@given(st.lists(st.sampled_from([UP, UP2, X]), max_size=8))
def test_free_slots_are_shared_among_those_that_have_work_here(senders):
    pipeline = machine(slots=8)
    for counter, sender in enumerate(senders):
        pipeline.handle(ActArrived(sender, key(counter), 1, 60.0), 0.0)
    free = 8 - len(senders)
    grants = {sender: pipeline.grant(sender) for sender in set(senders)}
    for sender, grant in grants.items():
        assert grant >= max(1, senders.count(sender))
    assert sum(grants.values()) <= max(8, len(senders)) + len(grants)
    if grants:
        assert sum(grants.values()) >= len(senders) + free
    assert pipeline.grant(Y) >= 1


def test_a_slow_peer_gets_the_time_that_it_needs_and_an_unknown_one_the_first_patience():
    pipeline = machine(X)
    assert sent(pipeline, 0, 0.0).deadline_seconds == FIRST_DEADLINE_SECONDS
    answered(pipeline, X, 0, 6.0)
    pipeline.router.on_credit(X, 8, 0.2, 0)
    for counter in range(1, 60):
        start = 10.0 * counter
        sent(pipeline, counter, start)
        answered(pipeline, X, counter, start + 0.2)
    assert sent(pipeline, 100, 1000.0).deadline_seconds < DEADLINE_FACTOR * 6.0 / 2
    assert pipeline.answers.slowest < 6.0 / 2


def test_one_slow_answer_makes_patience_twice_as_long_as_it_took():
    pipeline = machine(X)
    for counter, took in enumerate([0.1] * 30 + [3.0]):
        sent(pipeline, counter, 10.0 * counter)
        answered(pipeline, X, counter, 10.0 * counter + took)
        pipeline.router.on_credit(X, 8, 0.1, 0)
    patience = sent(pipeline, 99, 1000.0).deadline_seconds
    assert patience >= SLOWEST_FACTOR * 3.0 > SHORTEST_DEADLINE_SECONDS


def test_a_microbatch_that_waited_for_room_goes_as_soon_as_an_answer_comes():
    pipeline = machine(X)
    for counter in range(FIRST_SLOTS):
        sent(pipeline, counter, 0.0)
    pipeline.handle(MicrobatchCut(key(7)), 0.0)
    assert pipeline.handle(ForwardDone(key(7)), 0.0) == []
    effects = pipeline.handle(GradArrived(X, key(0), 1), 0.05)
    assert [effect.key for effect in effects if isinstance(effect, SendAct)] == [key(7)]


def test_no_try_is_begun_that_could_not_be_answered_in_time():
    pipeline = machine(X, Y, slots=64)
    for counter in range(12):  # Both are known, and take 4 s.
        sent(pipeline, counter, 10.0 * counter)
        act = pipeline.jobs[key(counter)].next
        assert act is not None
        answered(pipeline, act, counter, 10.0 * counter + 4.0)
    pipeline.handle(ActArrived(UP, key(50), 1, 5.0), 200.0)
    (act,) = pipeline.handle(ForwardDone(key(50)), 200.0)
    assert isinstance(act, SendAct)
    effects = pipeline.handle(PipelineTick(), 200.0 + act.deadline_seconds)
    assert [effect for effect in effects if isinstance(effect, SendAct)] == []
    (nack,) = [effect for effect in effects if isinstance(effect, SendNack)]
    assert (nack.key, nack.code) == (key(50), "deadline")
    assert pipeline.router.peers[act.peer].failures == 1 < MAX_ATTEMPTS


def test_bodies_have_their_time_on_a_home_line_before_anything_is_measured():
    """5 MB take 4 s at 10 Mbit/s, 14 times in eight stages."""
    assert AnswerTimes(Router(Random(1)), 7, 5_000_000).patience(X) == DEADLINE_FACTOR * 14 * 4.0
    assert AnswerTimes(Router(Random(1)), 7, 50_000).patience(X) == FIRST_DEADLINE_SECONDS


def test_patience_grows_while_nothing_was_ever_answered_once_for_all_that_waited_together():
    times = AnswerTimes(Router(Random(1)), 1)
    for _ in range(3):
        times.missed(0.0, 20.0)
    assert times.patience(X) == 2 * FIRST_DEADLINE_SECONDS
    for sent_at in (20.0, 60.0, 140.0, 300.0, 900.0):
        times.missed(sent_at, 2 * sent_at + 20.0)
    assert times.patience(X) == LONGEST_FIRST_SECONDS
    times.took(1.0)
    assert times.patience() == DEADLINE_FACTOR


def test_who_was_never_tried_gets_what_the_others_took():
    times = AnswerTimes(Router(Random(1)), 7)
    times.took(60.0)
    assert times.patience(X) == DEADLINE_FACTOR * 60.0
