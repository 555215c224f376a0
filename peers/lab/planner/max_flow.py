"""Maximum throughput of a swarm: the maximum flow from the first stage's peers to the last stage's.

Peers and links have capacities in microbatches per second. If every peer may send to every peer of the next
stage and links have no limit, the maximum is the smallest sum of a stage. Otherwise Dinic's algorithm (1970,
blocking flows on level graphs) computes it exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

SMALLEST = 1e-12
"""Flow below this is rounding."""


@dataclass(slots=True)
class Graph:
    """Directed edges with capacities. Edge e and e ^ 1 are each other's reverse."""

    nodes: int
    head: list[int] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    edges_of: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.edges_of = [[] for _ in range(self.nodes)]

    def edge(self, tail: int, head: int, capacity: float) -> None:
        for a, b, room in ((tail, head, capacity), (head, tail, 0.0)):
            self.edges_of[a].append(len(self.head))
            self.head.append(b)
            self.left.append(room)

    def max_flow(self, source: int, sink: int) -> float:
        total = 0.0
        while (level := self._levels(source, sink))[sink] >= 0:
            position = [0] * self.nodes
            while (found := self._augment(source, sink, level, position)) > SMALLEST:
                total += found
        return total

    def _levels(self, source: int, sink: int) -> list[int]:
        level = [-1] * self.nodes
        level[source] = 0
        queue = deque([source])
        while queue and level[sink] < 0:
            node = queue.popleft()
            for edge in self.edges_of[node]:
                if self.left[edge] > SMALLEST and level[self.head[edge]] < 0:
                    level[self.head[edge]] = level[node] + 1
                    queue.append(self.head[edge])
        return level

    def _augment(self, source: int, sink: int, level: list[int], position: list[int]) -> float:
        """Send flow along one path of rising levels, and return it; 0 if no path is left."""
        path: list[int] = []
        node = source
        while node != sink:
            edges = self.edges_of[node]
            while position[node] < len(edges):
                edge = edges[position[node]]
                if self.left[edge] > SMALLEST and level[self.head[edge]] == level[node] + 1:
                    break
                position[node] += 1
            else:
                if not path:
                    return 0.0
                node = self.head[path.pop() ^ 1]
                position[node] += 1
                continue
            path.append(edge)
            node = self.head[edge]
        room = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= room
            self.left[edge ^ 1] += room
        return room


def most(
    stages: Sequence[Sequence[int]],
    capacity: Sequence[float],
    below: Sequence[Sequence[int]] | None = None,
    link: Sequence[Sequence[float]] | None = None,
) -> float:
    """Return the maximum microbatches per second from the first to the last stage.

    `stages[s]`: the peers of stage s. `capacity[p]`: microbatches per second of peer p. `below[p]`: the peers
    of the next stage to which p may send; None: all. `link[a][b]`: capacity of the link; None: no limit.
    """
    if below is None and link is None:
        return min(sum(capacity[peer] for peer in peers) for peers in stages)
    count = len(capacity)
    graph = Graph(2 * count + 2)
    source, sink = 2 * count, 2 * count + 1
    for peer, room in enumerate(capacity):
        graph.edge(2 * peer, 2 * peer + 1, room)
    unbounded = sum(capacity)
    for number, peers in enumerate(stages):
        following = stages[number + 1] if number + 1 < len(stages) else ()
        for peer in peers:
            if number == 0:
                graph.edge(source, 2 * peer, unbounded)
            if not following:
                graph.edge(2 * peer + 1, sink, unbounded)
            for other in following if below is None else (below[peer] if following else ()):
                graph.edge(2 * peer + 1, 2 * other, unbounded if link is None else link[peer][other])
    return graph.max_flow(source, sink)
