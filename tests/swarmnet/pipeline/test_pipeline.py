"""The machine of microbatches on hand-set time: every way that one can go, and random walks."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from microbatches import KEY, UP, UP2, X, Y, machine, waiting

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.events import (
    ActArrived,
    BackwardDone,
    BusyArrived,
    CancelArrived,
    ComputeBackward,
    ComputeFailed,
    ComputeForward,
    Forget,
    ForwardDone,
    GradArrived,
    LastDone,
    MicrobatchCut,
    NackArrived,
    PeerLost,
    PipelineTick,
    SendAct,
    SendBusy,
    SendCancel,
    SendGrad,
    SendNack,
)
from swarmnet.pipeline.ledger import MicrobatchLedger
from swarmnet.pipeline.pipeline import KEEP_SECONDS, MAX_ATTEMPTS, RETRY_SECONDS, Pipeline
from swarmnet.pipeline.timeouts import FIRST_DEADLINE_SECONDS
from swarmnet.routing.load_balancer import Router


def in_flight(pipeline: Pipeline) -> int:
    return sum(estimate.in_flight for estimate in pipeline.router.peers.values())


def test_a_microbatch_goes_down_and_comes_back_and_its_answer_is_kept_for_a_while():
    pipeline, act = waiting(X)
    assert act == SendAct(KEY, X, 1, FIRST_DEADLINE_SECONDS)
    assert pipeline.handle(GradArrived(X, KEY, 1), 2.0) == [ComputeBackward(KEY)]
    assert pipeline.handle(BackwardDone(KEY, 32), 3.0) == [SendGrad(KEY, UP, 1)]
    assert (pipeline.ledger.committed, pipeline.ledger.tokens, in_flight(pipeline)) == (1, 32, 0)
    assert pipeline.answers.usual == 1.0
    assert pipeline.handle(PipelineTick(), 3.0 + KEEP_SECONDS) == [Forget(KEY)]
    assert not pipeline.jobs


def test_an_origin_forgets_its_microbatch_at_once_and_the_last_stage_answers_after_one_computation():
    pipeline = machine(X)
    assert pipeline.handle(MicrobatchCut(KEY), 0.0) == [ComputeForward(KEY)]
    assert pipeline.started_here == 1
    pipeline.handle(ForwardDone(KEY), 0.1)
    pipeline.handle(GradArrived(X, KEY, 1), 0.2)
    assert pipeline.handle(BackwardDone(KEY, 32), 0.3) == [Forget(KEY)]
    assert pipeline.started_here == 0
    last = machine(stages_below=0)
    last.handle(ActArrived(UP, KEY, 3, 5.0), 0.0)
    assert last.handle(LastDone(KEY, 32), 0.1) == [SendGrad(KEY, UP, 3)]


@pytest.mark.parametrize("phase", ["forward", "waiting", "unrouted", "backward", "done"])
def test_whoever_asks_again_gets_the_answer_as_well_and_it_is_not_added_again(phase):
    below = [X]
    pipeline = Pipeline(
        stages_below=1,
        router=Router(Random(1)),
        candidates=lambda _key, _tried: below,
        slots=2,
        ledger=MicrobatchLedger(),
    )
    pipeline.handle(ActArrived(UP, KEY, 1, 60.0), 0.0)
    if phase == "unrouted":
        below.clear()
    if phase != "forward":
        pipeline.handle(ForwardDone(KEY), 1.0)
    if phase in ("backward", "done"):
        pipeline.handle(GradArrived(X, KEY, 1), 1.1)
    if phase == "done":
        pipeline.handle(BackwardDone(KEY, 32), 1.2)
    assert pipeline.jobs[KEY].phase == phase
    again = pipeline.handle(ActArrived(UP2, KEY, 5, 60.0), 1.3)
    assert again == ([SendGrad(KEY, UP2, 5)] if phase == "done" else [])
    assert pipeline.ledger.repeated == (phase == "done")
    below[:] = [X]
    if phase == "forward":
        pipeline.handle(ForwardDone(KEY), 1.4)
    elif phase == "unrouted":
        pipeline.handle(PipelineTick(), 1.4)
    if phase != "done":
        pipeline.handle(GradArrived(X, KEY, 1), 1.5)
        both = [SendGrad(KEY, UP, 1), SendGrad(KEY, UP2, 5)]
        assert pipeline.handle(BackwardDone(KEY, 32), 1.6) == both
    assert pipeline.ledger.committed == 1


def test_an_act_after_the_answer_was_forgotten_is_refused_and_not_computed():
    pipeline, _ = waiting(X)
    pipeline.handle(GradArrived(X, KEY, 1), 2.0)
    pipeline.handle(BackwardDone(KEY, 32), 3.0)
    pipeline.handle(PipelineTick(), 100.0)
    (nack,) = pipeline.handle(ActArrived(UP, KEY, 2, 5.0), 101.0)
    assert isinstance(nack, SendNack)
    assert (nack.code, nack.attempt) == ("committed", 2)


def test_a_full_peer_says_busy_at_once():
    pipeline = machine(X, slots=1)
    pipeline.handle(ActArrived(UP, KEY, 1, 5.0), 0.0)
    other = MicrobatchId(KEY.origin, 8)
    assert pipeline.handle(ActArrived(UP, other, 4, 5.0), 0.1) == [SendBusy(other, UP, 4)]
    assert other not in pipeline.jobs
    assert pipeline.ledger.refused == 1


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (lambda act: BusyArrived(act.peer, KEY, act.attempt), "busy"),
        (lambda act: NackArrived(act.peer, KEY, act.attempt, "not_ready"), "not_ready"),
        (lambda act: PeerLost(act.peer), "gone"),
    ],
)
def test_whoever_does_not_do_it_is_replaced_by_another(event, code):
    pipeline, act = waiting(X, Y)
    (again,) = pipeline.handle(event(act), 1.1)
    assert isinstance(again, SendAct)
    assert {act.peer, again.peer} == {X, Y}
    assert (again.attempt, pipeline.ledger.rerouted, in_flight(pipeline)) == (2, {code: 1}, 1)


def test_a_missed_deadline_cancels_there_and_sends_elsewhere_and_the_late_answer_still_counts():
    pipeline, act = waiting(X, Y)
    late = pipeline.next_deadline()
    assert late == 1.0 + FIRST_DEADLINE_SECONDS
    cancel, again = pipeline.handle(PipelineTick(), late)
    assert cancel == SendCancel(KEY, act.peer, 1)
    assert isinstance(again, SendAct)
    effects = pipeline.handle(GradArrived(act.peer, KEY, 1), late + 0.1)
    assert effects == [SendCancel(KEY, again.peer, 2), ComputeBackward(KEY)]
    assert in_flight(pipeline) == 0
    assert pipeline.handle(GradArrived(again.peer, KEY, 2), late + 0.2) == []
    assert pipeline.ledger.late_answers == 1


def test_answers_and_refusals_of_strangers_and_of_old_attempts_change_nothing():
    pipeline, act = waiting(X, Y)
    stranger = PeerId("stranger")
    for event in (
        GradArrived(stranger, KEY, 1),
        BusyArrived(stranger, KEY, 1),
        NackArrived(act.peer, KEY, 0, "malformed"),
        CancelArrived(stranger, KEY, 1),
        CancelArrived(UP, MicrobatchId(KEY.origin, 99), 1),
        GradArrived(act.peer, MicrobatchId(KEY.origin, 99), 1),
    ):
        assert pipeline.handle(event, 1.1) == [], event
    assert pipeline.jobs[KEY].phase == "waiting"


def test_when_nobody_can_do_it_the_sender_above_is_told():
    pipeline, _ = waiting(X)
    now, sent = 1.0, 1
    while KEY in pipeline.jobs:
        now = max(now, pipeline.next_deadline())
        effects = pipeline.handle(PipelineTick(), now)
        sent += sum(isinstance(effect, SendAct) for effect in effects)
    assert 1 <= sent <= MAX_ATTEMPTS
    assert now <= 60.0, "before the one above gives up"
    assert isinstance(effects[-2], SendNack)
    assert effects[-1] == Forget(KEY)
    assert pipeline.ledger.dropped == {"deadline": 1}


def test_without_a_route_it_waits_and_goes_as_soon_as_there_is_one():
    below: list[PeerId] = []
    pipeline = Pipeline(
        stages_below=1,
        router=Router(Random(1)),
        candidates=lambda _key, _tried: below,
        slots=2,
        ledger=MicrobatchLedger(),
    )
    pipeline.handle(ActArrived(UP, KEY, 1, 60.0), 0.0)
    assert pipeline.handle(ForwardDone(KEY), 1.0) == []
    assert not pipeline.has_room_ahead(1.0)
    assert pipeline.next_deadline() == 1.0 + RETRY_SECONDS
    assert pipeline.handle(PipelineTick(), 1.0 + RETRY_SECONDS) == []
    below.append(X)
    (act,) = pipeline.handle(PipelineTick(), 1.0 + 2 * RETRY_SECONDS)
    assert isinstance(act, SendAct)


@pytest.mark.parametrize("lost", [CancelArrived(UP, KEY, 1), PeerLost(UP)])
def test_cancelled_while_computing_forward_is_dropped_while_computing_backward_is_committed(lost):
    pipeline = machine(X)
    pipeline.handle(ActArrived(UP, KEY, 1, 60.0), 0.0)
    assert pipeline.handle(lost, 0.1) == []
    assert pipeline.handle(ForwardDone(KEY), 0.2) == [Forget(KEY)]
    assert pipeline.ledger.dropped == {"cancelled": 1}
    pipeline, _ = waiting(X)
    pipeline.handle(GradArrived(X, KEY, 1), 1.1)
    pipeline.handle(lost, 1.2)
    assert pipeline.handle(BackwardDone(KEY, 32), 1.3) == []
    assert pipeline.ledger.committed == 1
    assert pipeline.handle(ActArrived(UP2, KEY, 9, 5.0), 1.4) == [SendGrad(KEY, UP2, 9)]


def test_cancelled_while_waiting_is_cancelled_below_too():
    pipeline, act = waiting(X)
    assert pipeline.handle(CancelArrived(UP, KEY, 1), 1.1) == [SendCancel(KEY, act.peer, 1), Forget(KEY)]
    assert in_flight(pipeline) == 0


def answered_by(pipeline: Pipeline, answer_seconds: float, count: int, now: float) -> tuple[int, float]:
    """Start one microbatch after another whose answers take so long; how many came back, and the time."""
    back = 0
    for counter in range(count):
        key, sent = MicrobatchId(KEY.origin, counter + int(1000 * now)), {}
        pipeline.handle(MicrobatchCut(key), now)
        effects = pipeline.handle(ForwardDone(key), now)
        while key in pipeline.jobs:
            for effect in effects:
                if isinstance(effect, SendAct):
                    sent.setdefault(effect.peer, now)
            answer = min(sent.values(), default=float("inf")) + answer_seconds
            now = max(now, min(answer, pipeline.next_deadline()))
            if now >= answer:
                pipeline.handle(GradArrived(X, key, 1), now)
                pipeline.handle(BackwardDone(key, 32), now)
                back += 1
            else:
                effects = pipeline.handle(PipelineTick(), now)
    return back, now


@pytest.mark.parametrize("slow_seconds", [9.0, 45.0])
def test_an_origin_learns_that_answers_have_become_slow(slow_seconds):
    pipeline = machine(X, stages_below=1)
    back, now = answered_by(pipeline, 0.3, 20, 0.0)
    assert back == 20
    _, now = answered_by(pipeline, slow_seconds, 8, now)
    assert answered_by(pipeline, slow_seconds, 5, now)[0] == 5


def test_an_answer_to_an_earlier_try_took_the_time_since_that():
    pipeline = machine(X)
    pipeline.handle(ActArrived(UP, KEY, 1, 100.0), 0.0)
    pipeline.handle(ForwardDone(KEY), 1.0)
    again = pipeline.next_deadline()
    pipeline.handle(PipelineTick(), again)
    while pipeline.jobs[KEY].phase == "unrouted":  # It is left alone for a moment.
        pipeline.handle(PipelineTick(), again := pipeline.next_deadline())
    pipeline.handle(GradArrived(X, KEY, 1), again + 0.5)
    pipeline.handle(BackwardDone(KEY, 32), again + 0.6)
    assert pipeline.answers.usual == again + 0.5 - 1.0


def test_deadlines_shorten_with_every_hop():
    pipeline = machine(X)
    pipeline.handle(ActArrived(UP, KEY, 1, 10.0), 0.0)
    (act,) = pipeline.handle(ForwardDone(KEY), 2.0)
    assert isinstance(act, SendAct)
    assert act.deadline_seconds == pytest.approx(0.9 * 8.0)


def test_the_hops_of_a_long_way_are_left_their_part_of_the_time():
    first = left = 20.0
    for below in range(31, 0, -1):
        pipeline = machine(X, stages_below=below)
        pipeline.handle(ActArrived(UP, KEY, 1, left), 0.0)
        (act,) = pipeline.handle(ForwardDone(KEY), 0.0)
        assert isinstance(act, SendAct)
        assert first * below / 32 <= act.deadline_seconds < left
        left = act.deadline_seconds


class World:
    """A pipeline with its computations and bodies; draws what happens next from a seed."""

    def __init__(self, seed: int, last: bool) -> None:
        self.chance = Random(seed)
        self.now = 0.0
        self.last = last
        self.below: list[PeerId] = [X, Y]
        self.pipeline = Pipeline(
            stages_below=0 if last else 1,
            router=Router(Random(seed)),
            candidates=lambda _key, _tried: self.below,
            slots=3,
            ledger=MicrobatchLedger(),
        )
        self.bodies: set[MicrobatchId] = set()
        self.computing: list[tuple[str, MicrobatchId]] = []
        self.origin_counter = 1000

    def handle(self, event: object) -> None:
        for effect in self.pipeline.handle(event, self.now):
            match effect:
                case ComputeForward(key):
                    assert key not in self.bodies, "computed twice at once"
                    self.bodies.add(key)
                    self.computing.append(("forward", key))
                case ComputeBackward(key):
                    assert key in self.bodies
                    self.computing.append(("backward", key))
                case Forget(key):
                    self.bodies.remove(key)
                    assert all(key != other for _, other in self.computing), "forgotten while it is computed"
                case SendAct(key, peer, _, deadline):
                    assert key in self.bodies
                    assert peer in self.below
                    assert deadline > 0
                case SendGrad(key, _, _):
                    assert key in self.bodies
                    assert self.pipeline.jobs[key].phase == "done"
        assert self.bodies == self.pipeline.jobs.keys()
        assert self.pipeline.under_way <= 3 + 2, "slots, and two of its own"
        waits = [job for job in self.pipeline.jobs.values() if job.phase == "waiting"]
        assert in_flight(self.pipeline) == len(waits)

    def compute(self) -> None:
        kind, key = self.computing.pop(self.chance.randrange(len(self.computing)))
        if self.chance.random() < 0.15:
            self.handle(
                ComputeFailed(key, "not_finite", "drawn", kind == "backward" and self.chance.random() < 0.5)
            )
        elif kind == "backward":
            self.handle(BackwardDone(key, 32))
        else:
            self.handle(LastDone(key, 32) if self.last else ForwardDone(key))

    def tick(self) -> None:
        due = self.pipeline.next_deadline()
        if due != float("inf"):
            self.now = max(self.now, due)
        self.handle(PipelineTick())
        assert self.pipeline.next_deadline() > self.now, "it would be asked again at once, for ever"

    def step(self) -> None:
        chance = self.chance
        self.now += chance.choice([0.0, 0.01, 0.3, 2.0])
        key = MicrobatchId(PeerId(chance.choice("op")), chance.randrange(6))
        peer, attempt = chance.choice([X, Y, UP, UP2]), chance.randrange(4)
        if chance.random() < 0.1:
            self.below = chance.choice([[], [X], [Y], [X, Y]])
        if self.computing and chance.random() < 0.4:
            self.compute()
        elif not self.last and self.pipeline.started_here < 2 and chance.random() < 0.1:
            self.origin_counter += 1
            self.handle(MicrobatchCut(MicrobatchId(PeerId("me"), self.origin_counter)))
        else:
            own = [other for other in self.pipeline.jobs if chance.random() < 0.5]
            known = chance.choice(own) if own else key
            self.handle(
                chance.choice(
                    [
                        ActArrived(chance.choice([UP, UP2]), key, attempt, chance.choice([0.1, 5.0, 60.0])),
                        GradArrived(peer, known, attempt),
                        GradArrived(peer, known, attempt),
                        BusyArrived(peer, known, attempt),
                        NackArrived(peer, known, attempt, "drawn"),
                        CancelArrived(peer, known, attempt),
                        PeerLost(peer),
                        PipelineTick(),
                    ]
                )
            )


@given(st.integers(0, 2**32), st.booleans(), st.integers(20, 300))
def test_whatever_happens_nothing_is_committed_twice_and_nothing_is_left_behind(seed, last, steps):
    world = World(seed, last)
    for _ in range(steps):
        world.step()
    for _ in range(2000):
        if not world.pipeline.jobs:
            break
        if world.computing:
            world.compute()
        else:
            world.now += 5.0
            world.tick()
    assert not world.pipeline.jobs
    assert not world.bodies
    assert in_flight(world.pipeline) == 0
    assert world.pipeline.next_deadline() == float("inf")
