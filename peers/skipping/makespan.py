"""The time of fixed routes, and nothing else: path_play.py's model again, in a fourth of its time.

The search for the best full pipeline plays hundreds of thousands of variants. tests/test_path_play.py holds
the two to the same figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from peers.skipping.play import BACKWARD, LOSS
from peers.skipping.topologies import Topology

ARRIVED, FORWARD, BACK, GRADIENT = range(4)


def makespan(topology: Topology, routes: Sequence[Sequence[int]]) -> float:
    """Seconds until every route's microbatch is back; those of one origin start in the order given."""
    peers, end = range(len(topology.stage)), topology.stages - 1
    hop, last = topology.hop, [stage == end for stage in topology.stage]
    forward = [(1 + LOSS + BACKWARD if last[p] else 1.0) * topology.forward[p] for p in peers]
    backward = [BACKWARD * topology.forward[p] for p in peers]
    free, busy = [topology.memory] * len(peers), [False] * len(peers)
    doors: list[deque[int]] = [deque() for _ in peers]
    forwards: list[deque[int]] = [deque() for _ in peers]
    backwards: list[deque[int]] = [deque() for _ in peers]
    place = [0] * len(routes)
    heap: list[tuple[float, int, int, int, int]] = []
    for number, route in enumerate(routes):
        doors[route[0]].append(number)
    now, sequence = 0.0, 0
    touched = sorted({route[0] for route in routes})
    while True:
        for peer in touched:
            door = doors[peer]
            while door and free[peer]:
                free[peer] -= 1
                forwards[peer].append(door.popleft())
            if not busy[peer] and (backwards[peer] or forwards[peer]):
                busy[peer], sequence = True, sequence + 1
                if backwards[peer]:
                    number = backwards[peer].popleft()
                    heappush(heap, (now + backward[peer], sequence, BACK, number, peer))
                else:
                    number = forwards[peer].popleft()
                    heappush(heap, (now + forward[peer], sequence, FORWARD, number, peer))
        if not heap:
            return now
        now, _, kind, number, peer = heappop(heap)
        touched = [peer]
        if kind == ARRIVED:
            (forwards if last[peer] else doors)[peer].append(number)
        elif kind == GRADIENT:
            backwards[peer].append(number)
        else:
            busy[peer], sequence = False, sequence + 1
            free[peer] += kind == BACK
            up = kind == BACK or last[peer]
            place[number] += -1 if up else 1
            if place[number] >= 0:
                other = routes[number][place[number]]
                event = (now + hop[peer][other], sequence, GRADIENT if up else ARRIVED, number, other)
                heappush(heap, event)
