"""A swarm of pipelines with stubbed compute: everything about microbatches is the peers' own code.

Each simulated peer runs the real `Pipeline` and a router (the real one unless a benchmark puts another in its
place). Simulated are what they stand on: compute that takes a given time, one piece at a time and backward
first (peers/compute.py), lines that carry one body after another at a given speed, and latency.

Times in seconds, sizes in bytes, speeds in bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from peers.capacity.events import Events
from peers.capacity.layout import Layout
from peers.capacity.peer import Machine, SimulatedPeer
from swarmnet.flow import Flow
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline_events import ActArrived, Event, GradArrived, PeerLost, Tick
from swarmnet.router import Router

NOTICED_SECONDS = 0.1
"""From a peer's death to its neighbours' knowing: sockets of a killed process are reset (hivemind.md 4c)."""


class Swarm:
    """All simulated peers, their lines and their clock."""

    def __init__(self, layout: Layout, router: Callable[[Random], Router], seed: int = 0) -> None:
        self.layout = layout
        self.router = router
        self.chance = Random(seed)
        self.events = Events()
        self.waited: dict[MicrobatchId, float] = {}
        """Seconds that microbatches waited for compute, on all stages; their answers tell it."""
        self.below: dict[tuple[PeerId, MicrobatchId], float] = {}
        """What a peer's own request to the stage below took; for `LatencyRouter`."""
        self.body_bytes = layout.work.body_bytes
        self.last_stage = max(peer.stage for peer in layout.peers)
        self.machines = {m: Machine(layout.cores) for m in {peer.machine for peer in layout.peers} if m >= 0}
        self.places_below = layout.known_below()
        self.places_above: list[list[int]] = [[] for _ in layout.peers]
        for place, below in enumerate(self.places_below):
            for other in below:
                self.places_above[other].append(place)
        self.peers: list[SimulatedPeer] = []
        """By number: all who ever were here."""
        self.here = [self._new(place) for place in range(len(layout.peers))]
        """Who is at each place of the layout, or was there last."""
        for peer in self.here:
            for place in self.places_below[peer.place]:
                self._know(peer, self.here[place])
        self._connection_free: dict[tuple[int, int], float] = {}

    def _new(self, place: int) -> SimulatedPeer:
        chance, flow = Random(self.chance.getrandbits(32)), Flow(self.layout.peers[place].in_flight)
        peer = SimulatedPeer(self, len(self.peers), place, self.router(chance), flow)
        self.peers.append(peer)
        return peer

    def _know(self, peer: SimulatedPeer, other: SimulatedPeer) -> None:
        peer.known.setdefault(other.spec.stage, []).append(other.id)

    def start(self) -> None:
        origins = sum(not peer.spec.stage for peer in self.peers)
        for peer in self.peers:
            if not peer.spec.stage:
                # Of the next stage it knows `known`, and its share of the origins that know them.
                seen = len(peer.known.get(1, ())) if self.layout.below is None else origins
                peer.flow.aim(self.last_stage + 1, origins, seen)
                self.events.at(self.chance.random() * 0.1, peer.receive, Tick())

    def run(self, until: float) -> None:
        self.events.run(until)

    @property
    def finished(self) -> int:
        return sum(peer.finished for peer in self.peers)

    # -- the network ----------------------------------------------------------------------------------

    def send(self, sender: SimulatedPeer, to: PeerId, size: int, event: Event) -> None:
        receiver = self.peers[int(to)]
        self.events.at(self._arrival(sender, receiver, size), receiver.receive, event)

    def send_act(self, sender: SimulatedPeer, act: ActArrived, to: PeerId) -> None:
        receiver = self.peers[int(to)]
        ways = sender.ways
        header = None if ways is None else ways.header_for(act.key, receiver.spec.stage)
        arrival = self._arrival(sender, receiver, self.body_bytes)
        self.events.at(arrival, receiver.receive_act, act, header)

    def send_grad(self, sender: SimulatedPeer, grad: GradArrived, spent: float, to: PeerId) -> None:
        """`spent`: compute of the sender and of those below it, in seconds."""
        receiver = self.peers[int(to)]
        arrival = self._arrival(sender, receiver, self.body_bytes)
        self.events.at(arrival, receiver.receive_grad, grad, spent)

    def _arrival(self, sender: SimulatedPeer, receiver: SimulatedPeer, size: int) -> float:
        """When something is there that is sent now. Bodies leave one after another at the sender's speed,
        come in one after another at the receiver's, and go one after another over each connection."""
        layout, now = self.layout, self.events.now
        latency = layout.latency(sender.place, receiver.place)
        if not size:
            return now + latency
        begins = max(now, sender.up_free)
        sender.up_free = begins + size / sender.spec.up
        came = sender.up_free + latency
        if layout.connection is not None:
            pair = sender.number, receiver.number
            free = max(begins, self._connection_free.get(pair, 0.0))
            self._connection_free[pair] = free + size / layout.connection(sender.place, receiver.place)
            came = max(came, self._connection_free[pair] + latency)
        first = max(begins + latency, receiver.down_free)
        receiver.down_free = max(came, first + size / receiver.spec.down)
        return receiver.down_free

    def tell(self, sender: SimulatedPeer, to: PeerId) -> None:
        """CREDIT, which follows every answer."""
        receiver = self.peers[int(to)]
        credit = (sender.pipeline.grant(to), sender.service_seconds, sender.queued)
        latency = self.layout.latency(sender.place, receiver.place)
        self.events.after(latency, self._told, receiver, sender.id, *credit)

    def _told(
        self, receiver: SimulatedPeer, peer: PeerId, slots: int, service_seconds: float, waiting: int
    ) -> None:
        if receiver.alive:
            receiver.router.told(peer, slots, service_seconds, waiting)
            receiver.pump()

    # -- who goes and comes ---------------------------------------------------------------------------

    def kill(self, place: int) -> None:
        """Power cut: what it held is gone, and its neighbours notice soon."""
        peer = self.here[place]
        peer.alive = False
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
        """Somebody new, alike, in the place of one that is gone. Nobody knows anything of it."""
        newcomer = self.here[place] = self._new(place)
        for other in self.places_below[place]:
            if self.here[other].alive:
                self._know(newcomer, self.here[other])
        for other in self.places_above[place]:
            if self.here[other].alive:
                self._know(self.here[other], newcomer)
        newcomer.receive(Tick())
