"""A swarm of pipelines with stubbed compute: everything about microbatches is the peers' own code.

Each simulated peer runs the real `Pipeline` and a router (the real one unless a benchmark puts another in its
place). Simulated are what they stand on: compute that takes a given time, one piece at a time and backward
first (peers/compute.py), lines that carry one body after another at a given speed, and latency.

Times in seconds, sizes in bytes, speeds in bytes per second.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random

from peers.capacity.events import Events
from peers.capacity.rules import LatencyRouter
from swarmnet.flow import Flow
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.ledger import Ledger
from swarmnet.pipeline import Pipeline
from swarmnet.pipeline_events import (
    ActArrived,
    BackwardDone,
    BusyArrived,
    CancelArrived,
    ComputeBackward,
    ComputeForward,
    Effect,
    Event,
    Forget,
    ForwardDone,
    GradArrived,
    LastDone,
    NackArrived,
    PeerLost,
    SendAct,
    SendBusy,
    SendCancel,
    SendGrad,
    SendNack,
    Start,
    Tick,
)
from swarmnet.router import Router

BACKWARD, FORWARD = range(2)
"""Backward before forward, as peers/compute.py has it."""
TOKENS = 1
"""Of a microbatch: the simulator counts microbatches."""
NOTICED_SECONDS = 0.1
"""From a peer's death to its neighbours' knowing: sockets of a killed process are reset (hivemind.md 4c)."""


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """What one peer has to give."""

    stage: int
    forward_seconds: float
    """Compute of a microbatch's forward; backward takes `Work.backward_ratio` times as long."""
    up: float = inf
    down: float = inf
    slots: int = 32
    in_flight: int = 64
    """Microbatches of its own; for peers of the first stage."""
    window: int | None = None
    """So many are kept under way all the time; None: `Flow` decides."""
    machine: int = -1
    """Peers of one machine share its cores; -1: has its own."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a microbatch costs, the same for all stages but for the peers' speeds."""

    body_bytes: int
    """Hidden states, and as much again for their gradient."""
    backward_ratio: float = 2.0
    scatter: float = 0.1
    """Compute times are drawn evenly from +- this share of their mean."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A swarm to be simulated."""

    peers: tuple[PeerSpec, ...]
    latency: Callable[[int, int], float]
    """One way, between two peers by their numbers."""
    work: Work
    below: tuple[tuple[int, ...], ...] | None = None
    """Peers of the next stage that each peer knows; None: all."""
    cores: int = 0
    """Of each machine that several peers share."""

    def stages(self) -> tuple[tuple[int, ...], ...]:
        count = 1 + max(peer.stage for peer in self.peers)
        found: list[list[int]] = [[] for _ in range(count)]
        for number, peer in enumerate(self.peers):
            found[peer.stage].append(number)
        return tuple(tuple(numbers) for numbers in found)

    def known_below(self) -> tuple[tuple[int, ...], ...]:
        if self.below is not None:
            return self.below
        stages = (*self.stages(), ())
        return tuple(stages[peer.stage + 1] for peer in self.peers)

    def capacity(self) -> tuple[float, ...]:
        """Microbatches per second of each peer alone: its compute, or its line if that takes longer.

        A peer in the middle sends and receives two bodies per microbatch, one at the ends one.
        """
        last = max(peer.stage for peer in self.peers)
        rates = []
        for peer in self.peers:
            compute = peer.forward_seconds * (1 + self.work.backward_ratio)
            bodies = (peer.stage > 0) + (peer.stage < last)
            line = bodies * self.work.body_bytes / min(peer.up, peer.down)
            rates.append(1.0 / max(compute, line))
        return tuple(rates)


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

    def __init__(self, swarm: Swarm, number: int, spec: PeerSpec, router: Router, flow: Flow) -> None:
        self.swarm, self.number, self.spec = swarm, number, spec
        self.id = PeerId(str(number))
        self.router = router
        self.known: list[PeerId] = []
        below = swarm.last_stage - spec.stage
        self.pipeline = Pipeline(below, router, lambda _key: self.known, spec.slots, Ledger())
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
        self._granted: dict[PeerId, int] = {}
        self._armed = inf
        self.up_free = self.down_free = 0.0

    @property
    def queued(self) -> int:
        """Pieces of work that wait for compute."""
        return len(self._queue)

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        for effect in self.pipeline.handle(event, self.swarm.events.now):
            self._carry_out(effect)

    def receive(self, event: Event) -> None:
        if self.alive:
            if isinstance(event, GradArrived) and self.pipeline.expects_answer(event.key, event.peer):
                self._answered(event)
            self.feed(event)
            self.pump()
            self._arm()

    def _answered(self, grad: GradArrived) -> None:
        swarm, key = self.swarm, grad.key
        self._spent[key] = self._spent.get(key, 0.0) + grad.path_seconds
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
            self.feed(Start(key))

    def _arm(self) -> None:
        events = self.swarm.events
        if self._armed > events.now + 0.05:
            due = self.pipeline.next_deadline()
            if due < self._armed:
                self._armed = due
                events.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if due == self._armed:
            self._armed = inf
            self.receive(Tick())

    def _carry_out(self, effect: Effect) -> None:
        swarm = self.swarm
        match effect:
            case ComputeForward(key):
                self._submit(FORWARD, key)
            case ComputeBackward(key):
                self._submit(BACKWARD, key)
            case SendAct(key, peer, attempt, deadline):
                swarm.send(self, peer, swarm.body_bytes, ActArrived(self.id, key, attempt, deadline))
            case SendGrad(key, peer, attempt):
                spent = self._spent.get(key, 0.0)
                swarm.send(self, peer, swarm.body_bytes, GradArrived(self.id, key, attempt, spent))
                swarm.tell(self, peer)
            case SendBusy(key, peer, attempt):
                swarm.send(self, peer, 0, BusyArrived(self.id, key, attempt))
                swarm.tell(self, peer)
            case SendNack(key, peer, attempt, code, _):
                swarm.send(self, peer, 0, NackArrived(self.id, key, attempt, code))
            case SendCancel(key, peer, attempt):
                swarm.send(self, peer, 0, CancelArrived(self.id, key, attempt))
            case Forget(key):
                self._spent.pop(key, None)
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
            self.feed(LastDone(key, TOKENS))
        elif priority == FORWARD:
            self.feed(ForwardDone(key))
        else:
            self._measured(seconds * (1 + 1 / self.swarm.layout.work.backward_ratio))
            if key.origin == self.id:
                self._finished(key)
            self.feed(BackwardDone(key, TOKENS))
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


class Swarm:
    """All simulated peers, their lines and their clock."""

    def __init__(self, layout: Layout, router: Callable[[Random], Router], seed: int = 0) -> None:
        self.layout = layout
        self.chance = Random(seed)
        self.events = Events()
        self.waited: dict[MicrobatchId, float] = {}
        """Seconds that microbatches waited for compute, on all stages; their answers tell it."""
        self.below: dict[tuple[PeerId, MicrobatchId], float] = {}
        """What a peer's own request to the stage below took; for `LatencyRouter`."""
        self.body_bytes = layout.work.body_bytes
        self.last_stage = max(peer.stage for peer in layout.peers)
        self.machines = {m: Machine(layout.cores) for m in {peer.machine for peer in layout.peers} if m >= 0}
        self.peers = [
            SimulatedPeer(
                self, number, spec, router(Random(self.chance.getrandbits(32))), Flow(spec.in_flight)
            )
            for number, spec in enumerate(layout.peers)
        ]
        for peer, below in zip(self.peers, layout.known_below(), strict=True):
            peer.known = [PeerId(str(number)) for number in below]

    def start(self) -> None:
        origins = sum(not peer.spec.stage for peer in self.peers)
        for peer in self.peers:
            if not peer.spec.stage:
                # Of the next stage it knows `known`, and its share of the origins that know them.
                seen = len(peer.known) if self.layout.below is None else origins
                peer.flow.aim(self.last_stage + 1, origins, seen)
                self.events.at(self.chance.random() * 0.1, peer.receive, Tick())

    def run(self, until: float) -> None:
        self.events.run(until)

    @property
    def finished(self) -> int:
        return sum(peer.finished for peer in self.peers)

    def send(self, sender: SimulatedPeer, to: PeerId, size: int, event: Event) -> None:
        """Bodies leave one after another at the sender's speed and come in at the receiver's."""
        receiver = self.peers[int(to)]
        now = self.events.now
        latency = self.layout.latency(sender.number, receiver.number)
        if not size:
            self.events.at(now + latency, receiver.receive, event)
            return
        sender.up_free = max(now, sender.up_free) + size / sender.spec.up
        came = sender.up_free + latency
        receiver.down_free = max(came, receiver.down_free + size / receiver.spec.down)
        self.events.at(receiver.down_free, receiver.receive, event)

    def tell(self, sender: SimulatedPeer, to: PeerId) -> None:
        """CREDIT, which follows every answer."""
        receiver = self.peers[int(to)]
        credit = (sender.pipeline.grant(to), sender.service_seconds, sender.queued)
        latency = self.layout.latency(sender.number, receiver.number)
        self.events.after(latency, self._told, receiver, sender.id, *credit)

    def _told(
        self, receiver: SimulatedPeer, peer: PeerId, slots: int, service_seconds: float, waiting: int
    ) -> None:
        if receiver.alive:
            receiver.router.told(peer, slots, service_seconds, waiting)
            receiver.pump()

    def kill(self, number: int) -> None:
        """Power cut: what it held is gone, and its neighbours notice soon."""
        peer = self.peers[number]
        peer.alive = False
        self.events.after(NOTICED_SECONDS, self._noticed, peer)

    def _noticed(self, gone: SimulatedPeer) -> None:
        for peer in self.peers:
            if peer.alive and abs(peer.spec.stage - gone.spec.stage) == 1:
                if gone.id in peer.known:
                    peer.known.remove(gone.id)
                peer.receive(PeerLost(gone.id))
