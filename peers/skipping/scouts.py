"""Finds the way online, by what peers tell one another: a question runs ahead of every body.

A body takes seconds for a hop, a question milliseconds. So when a microbatch's forward begins on its origin,
the cheapest next peer is asked whether it can begin then and then; that one books the microbatch or says no,
and, having said yes, asks on in turn. The way is settled before the body has left. Who is asked knows its own
bookings exactly, where the asker has only heard of them: a no costs one round trip of a few bytes.

What a peer knows: its own bookings, what neighbours told of theirs (as old as the latency between them), the
measured hops, and the neighbours' tables of costs to go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from peers.skipping.play import BACKWARD, LOSS, Play, Visit
from peers.skipping.topologies import Topology
from swarmnet.bookings import Booking, Load, earliest_start
from swarmnet.identifiers import PeerId
from swarmnet.pathfinder import Choice, Neighbour, ToGo, cheapest, costs_to_go
from swarmnet.paths import Rules, begin, check

TOLERANCE_SECONDS = 0.3
"""Who could begin no more than so much later than asked says yes."""
MOST_QUESTIONS = 4
"""The last of them is not refused for being late."""
RETRY_SECONDS = 0.1
REMEMBERED = 64
"""Loads of a neighbour on their way: more than are told within the longest latency."""


def capacity(topology: Topology, peer: int) -> Load:
    """A peer with nothing to do. The last stage does both passes and the loss at once."""
    forward = topology.forward[peer]
    if topology.stage[peer] == topology.stages - 1:
        return Load(1, forward, (BACKWARD + LOSS) * forward)
    return Load(topology.memory, forward, BACKWARD * forward)


class Scouts:
    """A `Guide` of path_play.py; what one peer does in it uses only what that peer knows."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.questions = 0
        self.refusals = 0
        self.swaps = 0

    def enter(self, play: Play) -> None:
        self.play = play
        topology = play.topology
        self.names = [PeerId(str(peer)) for peer in range(len(topology.stage))]
        self.books: list[dict[Visit, Booking]] = [{} for _ in self.names]
        self.loads = [capacity(topology, peer) for peer in range(len(self.names))]
        self.told: list[list[tuple[float, Load]]] = [[(-1.0, load)] for load in self.loads]
        self.to_go: list[ToGo] = [{} for _ in self.names]
        for _ in range(self.rules.stages):  # They told each other these long before.
            self.to_go = [self._table(peer) for peer in range(len(self.names))]

    def _table(self, peer: int) -> ToGo:
        stage = self.play.topology.stage[peer]
        return {} if stage == self.rules.last else costs_to_go(stage, self.rules, self._seen_by(peer))

    def _seen_by(self, peer: int) -> list[Neighbour]:
        """What this peer knows now of those that are alive."""
        topology, now = self.play.topology, self.play.now
        seen = []
        for other, stage in enumerate(topology.stage):
            if stage == 0 or other == peer or other in self.play.dead:
                continue
            heard = now - topology.latency[peer][other]
            load = next(load for since, load in reversed(self.told[other]) if since <= heard or since < 0)
            hop = topology.hop[peer][other]
            seen.append(Neighbour(self.names[other], stage, hop, load, self.to_go[other]))
        return seen

    # -- what the play tells --------------------------------------------------------------------------

    def forward_begins(self, visit: Visit) -> None:
        peer = visit.peer
        if visit.above is None:
            visit.header = begin(self.rules)
            self._ask(visit, self.play.now + self.play.topology.forward[peer], 1)
        elif visit in self.books[peer]:
            booked, now = self.books[peer][visit], self.play.now
            self._book(visit, Booking(now, booked.release + max(0.0, now - booked.start)))

    def ended(self, visit: Visit) -> None:
        if self.books[visit.peer].pop(visit, None) is not None:
            self._tell(visit.peer)

    def lost(self, visit: Visit) -> None:
        begun = self.books[visit.peer].get(visit)
        forward = self.play.topology.forward[visit.peer]
        ready = self.play.now if visit.computed or begun is None else begun.start + forward
        self._ask(visit, max(ready, self.play.now), 1)

    # -- question and answer --------------------------------------------------------------------------

    def _ask(self, visit: Visit, ready: float, question: int, swap_refused: bool = False) -> None:
        if visit.over or visit.below is not None:
            return
        assert visit.header is not None
        seen = self._seen_by(visit.peer)
        if swap_refused:
            seen = [other for other in seen if other.stage > visit.header.frontier]
        choice = cheapest(visit.header, self.rules, seen, ready, self.play.now)
        if choice is None:
            self.play.at(RETRY_SECONDS, self._ask, visit, ready, question)
            return
        if visit in self.books[visit.peer]:
            backward = self.loads[visit.peer].backward_seconds
            self._book(visit, replace(self.books[visit.peer][visit], release=choice.back + backward))
        self.questions += 1
        latency = self.play.topology.latency[visit.peer][int(choice.peer)]
        self.play.at(latency, self._asked, visit, choice, ready, question)

    def _asked(self, visit: Visit, choice: Choice, ready: float, question: int) -> None:
        """At the peer that was asked. It answers the neighbour, and asks on."""
        peer = int(choice.peer)
        latency = self.play.topology.latency[visit.peer][peer]
        again: Callable[..., None] = self._ask
        if visit.over or visit.below is not None:
            return
        if peer in self.play.dead:
            self.play.at(latency, again, visit, ready, question)
            return
        check(choice.header, self.play.topology.stage[peer], self.rules)
        load = self.loads[peer]
        start = earliest_start(load, choice.arrival, choice.release - choice.start, self.play.now)
        late = max(0.0, start - choice.start)
        if choice.swaps and self.play.free[peer] <= 0:
            self.refusals += 1
            self.play.at(latency, again, visit, ready, question + 1, True)
            return
        if late > TOLERANCE_SECONDS and question < MOST_QUESTIONS:
            self.refusals += 1
            self.play.at(latency, again, visit, ready, question + 1)
            return
        below = self.play.go_on(visit, peer, choice.header, notice=latency)
        if choice.swaps:
            self.swaps += 1
            self.play.hold(below)
        self._book(below, Booking(choice.start + late, choice.release + late))
        if self.play.topology.stage[peer] != self.rules.last:
            self._ask(below, choice.start + late + load.forward_seconds, 1)

    def _book(self, visit: Visit, booking: Booking) -> None:
        self.books[visit.peer][visit] = booking
        self._tell(visit.peer)

    def _tell(self, peer: int) -> None:
        self.loads[peer] = replace(self.loads[peer], bookings=tuple(self.books[peer].values()))
        self.told[peer].append((self.play.now, self.loads[peer]))
        if len(self.told[peer]) > 2 * REMEMBERED:
            del self.told[peer][:REMEMBERED]
