"""Plays microbatches through a topology: SkipPipe's time model, in continuous time, without chance.

Forward takes `forward` seconds, backward 1.5 times that, the loss a quarter; a processor does one thing at a
time, backward first. A hop takes what the topology says, its links are not shared. Between its forward and
its backward a microbatch holds memory; who arrives where none is left waits at the door, first come first
served, with nothing but its input. The last stage does both passes at once and needs no more than one place.

A `Guide` decides the way; the play knows no rules, it only keeps count.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from peers.skipping.topologies import Topology
from swarmnet.paths import Header

BACKWARD = 1.5
"""Times the forward: the reference's time model."""
LOSS = 0.25
"""Times the forward."""
LOSS_OF_PEER_SECONDS = 0.02
"""Until a peer sees that a link has ended, beside the latency: 18 ms were measured (docs/wire.md)."""


@dataclass(slots=True, eq=False)
class Visit:
    """A microbatch on one peer."""

    microbatch: int
    peer: int
    above: Visit | None = None
    below: Visit | None = None
    header: Header | None = None
    granted: float = 0.0
    """Its body may be sent to this peer from then on."""
    holds: bool = False
    """It has memory here."""
    computed: bool = False
    """Its forward is done and its output kept."""
    over: bool = False
    """Its backward is done, or it was cancelled."""


class Guide(Protocol):
    """Decides which way microbatches go, by calling `Play.go_on`."""

    def enter(self, play: Play) -> None:
        """Before anything happens."""

    def forward_begins(self, visit: Visit) -> None: ...

    def ended(self, visit: Visit) -> None:
        """Its memory is free again."""

    def lost(self, visit: Visit) -> None:
        """The peer below has died: find another way from here."""


@dataclass(slots=True)
class Outcome:
    seconds: float
    """Until the last backward on an origin."""
    paths: list[tuple[int, ...]] = field(default_factory=list)
    """Peers that each finished microbatch visited, origin first."""
    rerouted: dict[int, int] = field(default_factory=dict)
    """Microbatch -> times it had to find another way because a peer had died."""
    most_held: tuple[int, ...] = ()
    """Per peer: most microbatches in memory at a time."""


class Play:
    """One run of `shares[i]` microbatches from the i-th peer of stage 0."""

    def __init__(self, topology: Topology, guide: Guide, shares: Sequence[int]) -> None:
        count = len(topology.stage)
        self.topology, self.guide = topology, guide
        self.last = topology.stages - 1
        self.now = 0.0
        self.dead: set[int] = set()
        self.visits: set[Visit] = set()
        """All that are not over."""
        self.outcome = Outcome(float("inf"))
        self.free = [topology.memory] * count
        self._lowest = list(self.free)
        self._door: list[deque[Visit]] = [deque() for _ in range(count)]
        self._forward: list[deque[Visit]] = [deque() for _ in range(count)]
        self._backward: list[deque[Visit]] = [deque() for _ in range(count)]
        self._busy = [False] * count
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = 0
        self._to_finish = sum(shares)
        number = 0
        for origin, share in zip(topology.peers_of(0), shares, strict=True):
            for _ in range(share):
                visit = Visit(number, origin)
                self.visits.add(visit)
                self._door[origin].append(visit)
                number += 1

    def at(self, delay: float, action: Callable[..., None], *arguments: object) -> None:
        """Call it so many seconds from now."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, action, arguments))

    def run(self) -> Outcome:
        """Until every microbatch is finished; `seconds` stays infinite if that cannot be."""
        self.guide.enter(self)
        for origin in self.topology.peers_of(0):
            self._admit(origin)
        while self._heap and len(self.outcome.paths) < self._to_finish:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)
        if len(self.outcome.paths) == self._to_finish:
            self.outcome.seconds = self.now
        self.outcome.most_held = tuple(self.topology.memory - free for free in self._lowest)
        return self.outcome

    # -- what a guide does ----------------------------------------------------------------------------

    def go_on(self, visit: Visit, peer: int, header: Header | None = None, notice: float = 0.0) -> Visit:
        """Send a microbatch on to this peer once its forward is done, but not before `notice` seconds."""
        below = Visit(visit.microbatch, peer, visit, None, header, self.now + notice)
        visit.below = below
        self.visits.add(below)
        if visit.computed:
            self.at(notice, self._send, below)
        return below

    def hold(self, visit: Visit) -> bool:
        """Take memory for a microbatch that has not arrived yet; False if there is none."""
        if self.free[visit.peer] <= 0:
            return False
        self._take(visit)
        return True

    def kill(self, peer: int) -> None:
        """It dies at once with all it held; whoever had sent it something notices and goes another way."""
        if self.topology.stage[peer] == 0:
            raise ValueError("the microbatches of an origin die with it: nobody could finish them")
        self.dead.add(peer)
        for visit in [v for v in self.visits if v.peer == peer]:
            above = visit.above
            assert above is not None, "only visits on origins have nobody above"
            visit.over = True
            self.visits.discard(visit)
            if above.peer not in self.dead:
                delay = self.topology.latency[above.peer][peer] + LOSS_OF_PEER_SECONDS
                self.at(delay, self._notice, above, visit)

    def _notice(self, above: Visit, lost: Visit) -> None:
        if above.over or above.below is not lost:
            return
        below = lost.below
        while below is not None:
            self._end(below)
            below = below.below
        above.below = None
        number = above.microbatch
        self.outcome.rerouted[number] = self.outcome.rerouted.get(number, 0) + 1
        self.guide.lost(above)

    # -- the way of a microbatch ----------------------------------------------------------------------

    def _send(self, below: Visit) -> None:
        assert below.above is not None
        if not below.over:
            self.at(self.topology.hop[below.above.peer][below.peer], self._arrive, below)

    def _arrive(self, visit: Visit) -> None:
        if visit.over:
            return
        if visit.holds or self.topology.stage[visit.peer] == self.last:
            self._forward[visit.peer].append(visit)
            self._work(visit.peer)
        else:
            self._door[visit.peer].append(visit)
            self._admit(visit.peer)

    def _admit(self, peer: int) -> None:
        door = self._door[peer]
        while door and (self.free[peer] > 0 or door[0].over):
            visit = door.popleft()
            if not visit.over:
                self._take(visit)
                self._forward[peer].append(visit)
        self._work(peer)

    def _take(self, visit: Visit) -> None:
        visit.holds = True
        self.free[visit.peer] -= 1
        self._lowest[visit.peer] = min(self._lowest[visit.peer], self.free[visit.peer])

    def _work(self, peer: int) -> None:
        """Begin the next piece of work if the processor is free."""
        if self._busy[peer] or peer in self.dead:
            return
        forward_seconds = self.topology.forward[peer]
        for queue, is_forward in ((self._backward[peer], False), (self._forward[peer], True)):
            while queue:
                visit = queue.popleft()
                if visit.over:
                    continue
                self._busy[peer] = True
                if not is_forward:
                    self.at(BACKWARD * forward_seconds, self._backward_done, visit)
                    return
                both = 1 + LOSS + BACKWARD if self.topology.stage[peer] == self.last else 1.0
                self.at(both * forward_seconds, self._forward_done, visit)
                self.guide.forward_begins(visit)
                return

    def _forward_done(self, visit: Visit) -> None:
        self._busy[visit.peer] = False
        if not visit.over:
            if self.topology.stage[visit.peer] == self.last:
                self._answer(visit)
            else:
                visit.computed = True
                if visit.below is not None:
                    self.at(max(0.0, visit.below.granted - self.now), self._send, visit.below)
        self._work(visit.peer)

    def _answer(self, visit: Visit) -> None:
        """Its work here is done: the gradient goes up, or the microbatch is finished."""
        above = visit.above
        self._end(visit)
        if above is None:
            self.outcome.paths.append(_path(visit))
        else:
            self.at(self.topology.hop[visit.peer][above.peer], self._gradient, above, visit)

    def _gradient(self, visit: Visit, answered: Visit) -> None:
        if visit.over or visit.below is not answered:
            return
        self._backward[visit.peer].append(visit)
        self._work(visit.peer)

    def _backward_done(self, visit: Visit) -> None:
        self._busy[visit.peer] = False
        if not visit.over:
            self._answer(visit)
        self._work(visit.peer)

    def _end(self, visit: Visit) -> None:
        if visit.over:
            return
        visit.over = True
        self.visits.discard(visit)
        if visit.holds and visit.peer not in self.dead:
            self.free[visit.peer] += 1
        self.guide.ended(visit)
        self._admit(visit.peer)


def _path(visit: Visit) -> tuple[int, ...]:
    path = [visit.peer]
    while visit.below is not None:
        visit = visit.below
        path.append(visit.peer)
    return tuple(path)
