"""Simulator of a swarm of pipelines: the microbatch logic is the product's code, compute and network are not.

Each simulated peer runs the real `Pipeline` and a router (the real one unless a benchmark replaces it).
Compute is simulated: a task takes a given time, tasks run one at a time and backward passes first
(peers/compute/executor.py). So are latency and links, which carry one body after another at a given speed.

Times in seconds, sizes in bytes, speeds in bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from random import Random
from typing import Any

from peers.lab.planner import losses
from peers.lab.planner.layout import PeerSpec, SwarmLayout
from peers.lab.planner.simulated_machine import AccessLink, Events, SharedCores, SimulatedCompute
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.events import (
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
from swarmnet.pipeline.flow_control import Flow
from swarmnet.pipeline.ledger import MicrobatchLedger
from swarmnet.pipeline.pipeline import Pipeline
from swarmnet.resources.link_bandwidth import seconds_on_line
from swarmnet.routing.load_balancer import Router
from swarmnet.routing.skipping import Skipping
from swarmnet.run.path_rules import PathHeader

NOTICED_SECONDS = 0.1
"""Time until the neighbours notice a peer's death: sockets of a killed process are reset (hivemind.md 4c)."""
BACKWARD, FORWARD = range(2)
"""Backward before forward, as peers/compute/executor.py has it."""
TOKENS = 1
"""Tokens of a microbatch; 1, because the simulator counts microbatches."""
LOOK_SECONDS = 1.0
"""Interval at which an origin checks for room ahead; a real one checks at each heartbeat of a neighbour
(peers/worker/served_stage.py)."""
ARM_SECONDS = 0.05
"""Timers are not moved forward for a deadline that is less than this earlier."""


class OwnMicrobatches:
    """The microbatches that one origin has started, and the window in which flow control keeps them."""

    def __init__(self, origin: PeerId, flow: Flow, window: int | None) -> None:
        """`window`: fixed number of microbatches in flight; None: `flow` decides."""
        self.flow = flow
        self.in_flight = 0
        self.finished = 0
        """Number of microbatches that came back."""
        self._origin = origin
        self._window = window
        self._counter = 0
        self._started: dict[MicrobatchId, float] = {}
        if window is not None:  # The window starts small until the first microbatch has come back.
            flow.window = min(window, flow.window)

    def start(self, now: float) -> MicrobatchId:
        key = MicrobatchId(self._origin, self._counter)
        self._counter += 1
        self.in_flight += 1
        self._started[key] = now
        return key

    def finish(self, key: MicrobatchId, *, now: float, spent: float, waited: float) -> None:
        """Count a microbatch that came back: it was computed for `spent` seconds and queued for `waited`."""
        self.finished += 1
        if self._window is not None:
            self.flow.window = self._window
        else:
            self.flow.done(now - self._started[key], spent, waited, self.in_flight)

    def forget(self, key: MicrobatchId) -> None:
        self.in_flight -= 1
        self._started.pop(key, None)


class SimulatedPeer:
    """One peer: the real pipeline with simulated compute."""

    def __init__(self, *, swarm: Swarm, number: int, place: int, router: Router, flow: Flow) -> None:
        """`place`: index in the layout. `number`: unique; a replacement at a place has a new number."""
        self.swarm = swarm
        self.number = number
        self.place = place
        self.spec: PeerSpec = swarm.layout.peers[place]
        spec = self.spec
        self.id = PeerId(str(number))
        self.router = router
        self.known: dict[int, list[PeerId]] = {}
        """Live peers by stage, for the stages that microbatches can reach from here."""
        rules = swarm.layout.rules
        self.ways = Skipping(rules=rules, stage=spec.stage, live=self._live) if rules is not None else None
        below = swarm.last_stage - spec.stage
        body = swarm.layout.work.body_bytes
        self.pipeline = Pipeline(
            stages_below=below,
            router=router,
            candidates=self._candidates,
            slots=spec.slots,
            ledger=MicrobatchLedger(),
            body_bytes=body,
        )
        self.alive = True
        self.service_seconds = 0.0
        self.own = OwnMicrobatches(self.id, flow, spec.window)
        self.compute = SimulatedCompute(
            events=swarm.events, cores=swarm.cores, waited=swarm.waited, cost=self._cost, done=self._computed
        )
        self._spent: dict[MicrobatchId, float] = {}
        """Compute seconds here and in later stages, sent back with the gradient."""
        self._armed = inf
        self._poll_is_due = False
        bandwidth = swarm.layout.line(place)
        self.line_seconds = seconds_on_line(bandwidth, swarm.layout.crossing(spec.stage))
        self.link = AccessLink(bandwidth)

    def die(self) -> None:
        """End this peer's process, with its microbatches."""
        self.alive = False
        self.compute.stopped = True

    def _live(self, stage: int) -> list[PeerId]:
        return self.known.get(stage, [])

    def _candidates(self, key: MicrobatchId | None, tried: Collection[PeerId]) -> list[PeerId]:
        if self.ways is None:
            return self._live(self.spec.stage + 1)
        return self.ways.candidates(key, tried)

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        for effect in self.pipeline.handle(event, self.swarm.events.now):
            self._carry_out(effect)

    def receive(self, event: Event) -> None:
        if self.alive:
            self.feed(event)
            self.pump()
            self._arm()

    def receive_grad(self, grad: GradArrived, spent: float) -> None:
        """Receive a gradient. `spent`: compute seconds of the sender and of the stages after it."""
        if self.alive and self.pipeline.expects_answer(grad.key, grad.peer):
            self._spent[grad.key] = self._spent.get(grad.key, 0.0) + spent
        self.receive(grad)

    def receive_act(self, act: ActArrived, header: PathHeader | None) -> None:
        """Receive an activation. `header`: its path, if microbatches may skip stages."""
        if self.alive and self.ways is not None and header is not None:
            if self.ways.came_by_other_path(act.key, header):
                nack = NackArrived(self.id, act.key, act.attempt, "other_path")
                self.swarm.send(self, act.peer, nack)
                return
            self.ways.arrive(act.key, header)
        self.receive(act)
        if self.ways is not None and act.key not in self.pipeline.jobs:
            self.ways.forget(act.key)

    def pump(self) -> None:
        """Start microbatches while there is room ahead, as peers/worker/pipeline/pipeline_service.py does."""
        if self.spec.stage or not self.alive:
            return
        now = self.swarm.events.now
        while self.own.in_flight < self.own.flow.window and self.pipeline.has_room_ahead(now):
            key = self.own.start(now)
            if self.ways is not None:
                self.ways.start(key)
            self.feed(MicrobatchCut(key))

    def _arm(self) -> None:
        events = self.swarm.events
        # Without a microbatch in flight, nothing would wake it.
        if not (self.spec.stage or self.own.in_flight or self._poll_is_due):
            self._poll_is_due = True
            events.after(LOOK_SECONDS, self._poll)
        if self._armed > events.now + ARM_SECONDS:
            due = self.pipeline.next_deadline()
            if due < self._armed:
                self._armed = due
                events.at(due, self._tick, due)

    def _poll(self) -> None:
        self._poll_is_due = False
        if self.alive:
            self.pump()
            self._arm()

    def _tick(self, due: float) -> None:
        if due == self._armed:
            self._armed = inf
            self.receive(PipelineTick())

    def _carry_out(self, effect: Effect) -> None:
        swarm = self.swarm
        match effect:
            case ComputeForward(key):
                self.compute.submit(FORWARD, key)
            case ComputeBackward(key):
                self.compute.submit(BACKWARD, key)
            case SendAct(key, peer, attempt, deadline):
                swarm.send_act(self, ActArrived(self.id, key, attempt, deadline), peer)
            case SendGrad(key, peer, attempt):
                swarm.send_grad(self, GradArrived(self.id, key, attempt), self._spent.get(key, 0.0), peer)
                swarm.send_credit(self, peer)
            case SendBusy(key, peer, attempt):
                swarm.send(self, peer, BusyArrived(self.id, key, attempt))
                swarm.send_credit(self, peer)
            case SendNack(key, peer, attempt, code, _):
                swarm.send(self, peer, NackArrived(self.id, key, attempt, code))
            case SendCancel(key, peer, attempt):
                swarm.send(self, peer, CancelArrived(self.id, key, attempt))
            case Forget(key):
                self._spent.pop(key, None)
                if self.ways is not None:
                    self.ways.forget(key)
                if key.origin == self.id:
                    self.own.forget(key)
                    swarm.waited.pop(key, None)

    # -- compute --------------------------------------------------------------------------------------

    def _cost(self, priority: int) -> float:
        """Return the seconds of a forward or backward pass; the last stage does both at once."""
        swarm, is_last = self.swarm, self.spec.stage == self.swarm.last_stage
        ratio = swarm.layout.work.backward_ratio
        seconds = self.spec.forward_seconds * (1 + ratio if is_last else ratio if priority == BACKWARD else 1)
        return seconds * (1 + swarm.layout.work.scatter * (2 * swarm.chance.random() - 1))

    def _computed(self, priority: int, key: MicrobatchId, seconds: float) -> None:
        self._spent[key] = self._spent.get(key, 0.0) + seconds
        if self.spec.stage == self.swarm.last_stage:
            self._measured(seconds)
            if key.origin == self.id:
                self._finished(key)
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
        waited = self.swarm.waited.get(key, 0.0)
        self.own.finish(key, now=self.swarm.events.now, spent=self._spent[key], waited=waited)

    def _measured(self, seconds: float) -> None:
        known = self.service_seconds
        self.service_seconds = seconds if not known else known + 0.1 * (seconds - known)


class Swarm:
    """All simulated peers, their lines and their clock."""

    def __init__(self, layout: SwarmLayout, router: Callable[[Random], Router], seed: int = 0) -> None:
        self.layout = layout
        self.router = router
        self.chance = Random(seed)
        self.events = Events()
        self.waited: dict[MicrobatchId, float] = {}
        """Seconds that each microbatch waited for compute, over all stages; real peers send this back."""
        self.body_bytes = layout.work.body_bytes
        self.last_stage = max(peer.stage for peer in layout.peers)
        self.cores = SharedCores(layout.cores) if layout.cores else None
        """Cores that all peers share; None if each peer has its own."""
        self.places_below = layout.known_below()
        self.places_above: list[list[int]] = [[] for _ in layout.peers]
        for place, below in enumerate(self.places_below):
            for other in below:
                self.places_above[other].append(place)
        self.peers: list[SimulatedPeer] = []
        """All peers that ever joined, by number."""
        self.here = [self._new(place) for place in range(len(layout.peers))]
        """The present or last peer at each place of the layout."""
        for peer in self.here:
            for place in self.places_below[peer.place]:
                self._know(peer, self.here[place])
        self._connection_free: dict[tuple[int, int], float] = {}
        self._streams: dict[tuple[int, int], losses.Streams] = {}

    def _new(self, place: int) -> SimulatedPeer:
        chance, flow = Random(self.chance.getrandbits(32)), Flow(self.layout.peers[place].in_flight)
        peer = SimulatedPeer(
            swarm=self, number=len(self.peers), place=place, router=self.router(chance), flow=flow
        )
        self.peers.append(peer)
        return peer

    def _know(self, peer: SimulatedPeer, other: SimulatedPeer) -> None:
        peer.known.setdefault(other.spec.stage, []).append(other.id)

    def start(self) -> None:
        """Start the peers of the first stage, each within the first 0.1 seconds."""
        origins = sum(not peer.spec.stage for peer in self.peers)
        for peer in self.peers:
            if not peer.spec.stage:
                # `seen / origins` is the number of next-stage peers per origin; one if `below` is a sample.
                seen = len(peer.known.get(1, ())) if self.layout.below is None else origins
                peer.own.flow.aim(self.last_stage + 1, origins, seen)
                self.events.at(self.chance.random() * 0.1, peer.receive, PipelineTick())

    def run(self, until: float) -> None:
        self.events.run(until)

    @property
    def finished(self) -> int:
        return sum(peer.own.finished for peer in self.peers)

    # -- the network ----------------------------------------------------------------------------------

    def send(self, sender: SimulatedPeer, to: PeerId, event: Event) -> None:
        """Deliver a message without a body, after the latency alone."""
        receiver = self.peers[int(to)]
        latency = self.layout.latency(sender.place, receiver.place)
        self.events.after(latency, receiver.receive, event)

    def send_act(self, sender: SimulatedPeer, act: ActArrived, to: PeerId) -> None:
        receiver = self.peers[int(to)]
        ways = sender.ways
        header = None if ways is None else ways.header_for(act.key, receiver.spec.stage)
        self._send_body(sender, receiver, receiver.receive_act, act, header)

    def send_grad(self, sender: SimulatedPeer, grad: GradArrived, spent: float, to: PeerId) -> None:
        """Send a gradient. `spent`: compute seconds of the sender and of the stages after it."""
        receiver = self.peers[int(to)]
        self._send_body(sender, receiver, receiver.receive_grad, grad, spent)

    def _send_body(
        self,
        sender: SimulatedPeer,
        receiver: SimulatedPeer,
        callback: Callable[..., None],
        *arguments: Any,  # noqa: ANN401
    ) -> None:
        """Send a body: bodies leave the sender one after another, and so on each connection."""
        layout, now, size = self.layout, self.events.now, self.body_bytes
        begins, takes = sender.link.send(size, now)
        left = begins + takes
        if layout.connection is not None:
            pair = sender.number, receiver.number
            carried = size / layout.connection(sender.place, receiver.place)
            through = max(begins, self._connection_free.get(pair, 0.0)) + carried
            self._connection_free[pair] = through
            takes, left = max(takes, carried), max(left, through)
        latency = layout.latency(sender.place, receiver.place)
        if sender.spec.loss or receiver.spec.loss:
            streams = self._streams_between(sender, receiver, 2 * latency)
            takes, left = max(takes, size / streams.rate), max(left, streams.through(begins, size))
        came = left + latency
        self.events.at(came, self._came, receiver, takes, callback, *arguments)

    def _streams_between(
        self, sender: SimulatedPeer, receiver: SimulatedPeer, round_trip: float
    ) -> losses.Streams:
        pair = sender.number, receiver.number
        if pair not in self._streams:
            loss = losses.of_both(sender.spec.loss, receiver.spec.loss)
            repeats = losses.repeated(loss, round_trip, self.body_bytes)
            self._streams[pair] = losses.Streams(losses.carries(loss, round_trip), repeats)
        return self._streams[pair]

    def _came(
        self,
        receiver: SimulatedPeer,
        takes: float,
        callback: Callable[..., None],
        *arguments: Any,  # noqa: ANN401
    ) -> None:
        """Deliver a body that took `takes` seconds to send, when the receiver's link has carried it."""
        carried_at = receiver.link.receive(self.body_bytes, takes, self.events.now)
        if carried_at > self.events.now:
            self.events.at(carried_at, callback, *arguments)
        else:
            callback(*arguments)

    def send_credit(self, sender: SimulatedPeer, to: PeerId) -> None:
        """Send CREDIT, which follows every gradient and every BUSY."""
        receiver, seconds = self.peers[int(to)], sender.service_seconds
        if seconds > 0:
            seconds = max(seconds, sender.line_seconds)
        credit = (sender.pipeline.grant(to), seconds, sender.compute.queued)
        latency = self.layout.latency(sender.place, receiver.place)
        self.events.after(latency, self._on_credit, receiver, sender.id, *credit)

    def _on_credit(
        self, receiver: SimulatedPeer, peer: PeerId, slots: int, service_seconds: float, waiting: int
    ) -> None:
        if receiver.alive:
            receiver.router.on_credit(peer, slots, service_seconds, waiting)
            receiver.receive(PipelineTick())

    # -- who goes and comes ---------------------------------------------------------------------------

    def kill(self, place: int) -> None:
        """Remove the peer at `place` with its microbatches; neighbours notice after `NOTICED_SECONDS`."""
        peer = self.here[place]
        peer.die()
        self.events.after(NOTICED_SECONDS, self._noticed, peer)

    def _noticed(self, gone: SimulatedPeer) -> None:
        for place in (*self.places_above[gone.place], *self.places_below[gone.place]):
            peer = self.here[place]
            if peer.alive:
                known = peer.known.get(gone.spec.stage, [])
                if gone.id in known:
                    known.remove(gone.id)
                peer.receive(PeerLost(gone.id))

    def join(self, place: int) -> None:
        """Add a new peer of the same kind at the place of one that is gone; its speed is still unknown."""
        newcomer = self._new(place)
        self.here[place] = newcomer
        for other in self.places_below[place]:
            if self.here[other].alive:
                self._know(newcomer, self.here[other])
        for other in self.places_above[place]:
            if self.here[other].alive:
                self._know(self.here[other], newcomer)
        newcomer.receive(PipelineTick())
