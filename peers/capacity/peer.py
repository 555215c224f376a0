"""One simulated peer: the real pipeline and router on compute that only takes time.

Times in seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from math import inf
from typing import TYPE_CHECKING

from peers.capacity.layout import PeerSpec
from peers.capacity.rules import LatencyRouter
from swarmnet import pipeline_events as events
from swarmnet.flow import Flow
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.ledger import Ledger
from swarmnet.paths import Header
from swarmnet.pipeline import Pipeline
from swarmnet.router import Router
from swarmnet.skipping import Skipping

if TYPE_CHECKING:
    from peers.capacity.swarm import Swarm

BACKWARD, FORWARD = range(2)
"""Backward before forward, as peers/compute.py has it."""
TOKENS = 1
"""Of a microbatch: the simulator counts microbatches."""
ARM_SECONDS = 0.05
"""A deadline that is nearer than this to the one that is waited for is noticed with it."""


class Machine:
    """Cores that several peers share: who wants to compute waits for one, first come, first served."""

    def __init__(self, cores: int) -> None:
        self.free = cores
        self.waiting: deque[SimulatedPeer] = deque()

    def enter(self, peer: SimulatedPeer) -> None:
        self.waiting.append(peer)
        self._next()

    def leave(self) -> None:
        self.free += 1
        self._next()

    def _next(self) -> None:
        while self.free and self.waiting:
            peer = self.waiting.popleft()
            if peer.alive:
                self.free -= 1
                peer.compute()


class SimulatedPeer:
    """One peer: the real pipeline on simulated compute."""

    def __init__(self, swarm: Swarm, number: int, place: int, router: Router, flow: Flow) -> None:
        """`place`: that of the layout. Whoever comes in another's place has a number of its own."""
        self.swarm, self.number, self.place = swarm, number, place
        self.spec: PeerSpec = swarm.layout.peers[place]
        spec = self.spec
        self.id = PeerId(str(number))
        self.router = router
        self.known: dict[int, list[PeerId]] = {}
        """Live peers by stage, as far as a way leads from here."""
        rules = swarm.layout.rules
        self.ways = Skipping(rules, spec.stage, self._live) if rules is not None else None
        below = swarm.last_stage - spec.stage
        self.pipeline = Pipeline(below, router, self._candidates, spec.slots, Ledger())
        self.alive = True
        self.service_seconds = 0.0
        self.busy_seconds = 0.0
        self.flow = flow
        flow.window = spec.window or flow.window
        self.own = 0
        """Own microbatches under way."""
        self.finished = 0
        """Own microbatches that came back."""
        self.counter = 0
        self._queue: list[tuple[int, int, MicrobatchId, float]] = []
        self._order = 0
        self._computing = False
        self._started: dict[MicrobatchId, float] = {}
        self._spent: dict[MicrobatchId, float] = {}
        """Compute here and below, told up with the gradient."""
        self._armed = inf
        self.up_free = self.down_free = 0.0

    @property
    def queued(self) -> int:
        """Pieces of work that wait for compute."""
        return len(self._queue)

    def _live(self, stage: int) -> list[PeerId]:
        return self.known.get(stage, [])

    def _candidates(self, key: MicrobatchId | None, tried: Collection[PeerId]) -> list[PeerId]:
        if self.ways is None:
            return self._live(self.spec.stage + 1)
        return self.ways.candidates(key, tried)

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        for effect in self.pipeline.handle(event, self.swarm.events.now):
            self._carry_out(effect)

    def receive(self, event: events.Event) -> None:
        if self.alive:
            self.feed(event)
            self.pump()
            self._arm()

    def receive_grad(self, grad: events.GradArrived, spent: float) -> None:
        """`spent`: compute of the answering peer and of those below it, in seconds."""
        if self.alive and self.pipeline.expects_answer(grad.key, grad.peer):
            self._answered(grad, spent)
        self.receive(grad)

    def receive_act(self, act: events.ActArrived, header: Header | None) -> None:
        """`header`: its way, where microbatches may leave stages out."""
        if self.alive and self.ways is not None and header is not None:
            if self.ways.came_otherwise(act.key, header):
                nack = events.NackArrived(self.id, act.key, act.attempt, "other_path")
                self.swarm.send(self, act.peer, 0, nack)
                return
            self.ways.arrive(act.key, header)
        self.receive(act)
        if self.ways is not None and act.key not in self.pipeline.jobs:
            self.ways.forget(act.key)

    def _answered(self, grad: events.GradArrived, spent: float) -> None:
        swarm, key = self.swarm, grad.key
        self._spent[key] = self._spent.get(key, 0.0) + spent
        if isinstance(self.router, LatencyRouter):
            took = swarm.events.now - self.pipeline.jobs[key].sent_at
            self.router.measured(grad.peer, max(0.0, took - swarm.below.pop((grad.peer, key), 0.0)))
            if self.spec.stage:
                swarm.below[self.id, key] = took

    def pump(self) -> None:
        """Start microbatches while there is room ahead, as peers/data_path.py does."""
        if self.spec.stage or not self.alive:
            return
        now = self.swarm.events.now
        while self.own < self.flow.window and self.pipeline.has_room_ahead(now):
            key = MicrobatchId(self.id, self.counter)
            self.counter += 1
            self.own += 1
            self._started[key] = now
            if self.ways is not None:
                self.ways.start(key)
            self.feed(events.Start(key))

    def _arm(self) -> None:
        agenda = self.swarm.events
        if self._armed > agenda.now + ARM_SECONDS:
            due = self.pipeline.next_deadline()
            if due < self._armed:
                self._armed = due
                agenda.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if due == self._armed:
            self._armed = inf
            self.receive(events.Tick())

    def _carry_out(self, effect: events.Effect) -> None:
        swarm = self.swarm
        match effect:
            case events.ComputeForward(key):
                self._submit(FORWARD, key)
            case events.ComputeBackward(key):
                self._submit(BACKWARD, key)
            case events.SendAct(key, peer, attempt, deadline):
                swarm.send_act(self, events.ActArrived(self.id, key, attempt, deadline), peer)
            case events.SendGrad(key, peer, attempt):
                arrived, spent = events.GradArrived(self.id, key, attempt), self._spent.get(key, 0.0)
                swarm.send_grad(self, arrived, spent, peer)
                swarm.tell(self, peer)
            case events.SendBusy(key, peer, attempt):
                swarm.send(self, peer, 0, events.BusyArrived(self.id, key, attempt))
                swarm.tell(self, peer)
            case events.SendNack(key, peer, attempt, code, _):
                swarm.send(self, peer, 0, events.NackArrived(self.id, key, attempt, code))
            case events.SendCancel(key, peer, attempt):
                swarm.send(self, peer, 0, events.CancelArrived(self.id, key, attempt))
            case events.Forget(key):
                self._spent.pop(key, None)
                if self.ways is not None:
                    self.ways.forget(key)
                if key.origin == self.id:
                    self.own -= 1
                    self._started.pop(key, None)
                    swarm.waited.pop(key, None)

    # -- compute --------------------------------------------------------------------------------------

    def _submit(self, priority: int, key: MicrobatchId) -> None:
        self._order += 1
        heapq.heappush(self._queue, (priority, self._order, key, self.swarm.events.now))
        if not self._computing:
            self._computing = True
            self._go_on()

    def _go_on(self) -> None:
        machine = self.swarm.machines.get(self.spec.machine)
        if machine is None:
            self.compute()
        else:
            machine.enter(self)

    def compute(self) -> None:
        priority, _, key, since = heapq.heappop(self._queue)
        waited = self.swarm.waited
        waited[key] = waited.get(key, 0.0) + self.swarm.events.now - since
        swarm, is_last = self.swarm, self.spec.stage == self.swarm.last_stage
        ratio = swarm.layout.work.backward_ratio
        seconds = self.spec.forward_seconds * (1 + ratio if is_last else ratio if priority == BACKWARD else 1)
        seconds *= 1 + swarm.layout.work.scatter * (2 * swarm.chance.random() - 1)
        swarm.events.after(seconds, self._computed, priority, key, seconds)

    def _computed(self, priority: int, key: MicrobatchId, seconds: float) -> None:
        machine = self.swarm.machines.get(self.spec.machine)
        if machine is not None:
            machine.leave()
        self._computing = self.alive and bool(self._queue)
        if self._computing:
            self._go_on()
        if not self.alive:
            return
        self.busy_seconds += seconds
        self._spent[key] = self._spent.get(key, 0.0) + seconds
        if self.spec.stage == self.swarm.last_stage:
            self._measured(seconds)
            self.feed(events.LastDone(key, TOKENS))
        elif priority == FORWARD:
            self.feed(events.ForwardDone(key))
        else:
            self._measured(seconds * (1 + 1 / self.swarm.layout.work.backward_ratio))
            if key.origin == self.id:
                self._finished(key)
            self.feed(events.BackwardDone(key, TOKENS))
        self.pump()
        self._arm()

    def _finished(self, key: MicrobatchId) -> None:
        swarm = self.swarm
        self.finished += 1
        total = swarm.events.now - self._started[key]
        if self.spec.window is None:
            self.flow.done(total, self._spent[key], swarm.waited.get(key, 0.0), self.own)

    def _measured(self, seconds: float) -> None:
        known = self.service_seconds
        self.service_seconds = seconds if not known else known + 0.1 * (seconds - known)
