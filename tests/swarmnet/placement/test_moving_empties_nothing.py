"""A stage is never emptied by a move, whatever the directory says and however late beats are."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.placement.mover import (
    AnnounceMove,
    DirectoryQueried,
    GroupBeat,
    GroupPeerGone,
    Mover,
    MoveToStage,
    PlacementTick,
    QueryDirectory,
)
from swarmnet.placement.policy import (
    MoveRules,
    View,
)

HASTY = MoveRules((1.0, 1.0, 1.0), recheck_seconds=(0.0, 2.0))
"""Sooner than beats take."""


class Room:
    """Movers whose directory tells each whatever makes it leave, and whose beats are late and get lost."""

    def __init__(self, peers: list[int], seed: int) -> None:
        self.chance, self.now, self.order, self.moves = Random(seed), 0.0, 0, 0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.stage: dict[PeerId, int] = {}
        self.serving: set[PeerId] = set()
        self.movers: dict[PeerId, Mover] = {}
        self.serial: dict[PeerId, int] = {}
        self.heard: dict[PeerId, dict[PeerId, int]] = {}
        self.arrives: dict[tuple[PeerId, PeerId], float] = {}
        for number, at in enumerate(peers):
            name = PeerId(f"p{number}")
            self.serial[name] = 0
            self.settle(name, at)
            self.later(self.chance.random(), lambda name=name: self.beat(name))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.heap, (self.now + seconds, self.order, action))

    def play(self, seconds: float) -> None:
        while self.heap and self.heap[0][0] < seconds:
            self.now, _, action = heapq.heappop(self.heap)
            action()

    def settle(self, name: PeerId, at: int) -> None:
        self.stage[name] = at
        self.serving.add(name)
        self.heard[name] = {}
        machine = self.movers[name] = Mover(name, at, HASTY, self.chance, self.now, 1.0)
        self.wake(name, machine)

    def wake(self, name: PeerId, machine: Mover) -> None:
        due = machine.next_deadline()
        if due < float("inf"):
            self.later(due - self.now, lambda: self.feed(name, machine, PlacementTick()))

    def feed(self, name: PeerId, machine: Mover, event) -> None:
        if self.movers.get(name) is not machine:
            return
        due = machine.next_deadline()
        for effect in machine.handle(event, self.now):
            if isinstance(effect, QueryDirectory):
                told = [1.0] * 3
                told[self.stage[name]] = 9.0  # Everybody is told that its own stage is the rich one.
                answer = DirectoryQueried(View(tuple(told)), 1.0)
                self.later(self.chance.random(), lambda answer=answer: self.feed(name, machine, answer))
            elif isinstance(effect, AnnounceMove):
                self.serial[name] += 1
            elif isinstance(effect, MoveToStage):
                self.leave(name, effect.stage)
        if self.movers.get(name) is machine and machine.next_deadline() != due:
            self.wake(name, machine)

    def leave(self, name: PeerId, target: int) -> None:
        self.moves += 1
        self.serving.discard(name)
        left = [peer for peer in self.serving if self.stage[peer] == self.stage[name]]
        assert left, f"{name} emptied stage {self.stage[name]}"
        del self.movers[name]
        for mate in left:
            gone = (mate, self.movers[mate], GroupPeerGone(name))
            self.later(self.chance.uniform(0, 4), lambda gone=gone: self.feed(*gone))
        self.stage[name] = -1
        self.later(self.chance.uniform(1, 9), lambda: self.settle(name, target))

    def beat(self, name: PeerId) -> None:
        """To every mate, in order on each way, with a delay; one in five is lost."""
        self.later(1.0, lambda: self.beat(name))
        if name not in self.serving:
            return
        intent = self.movers[name].intent
        serial = self.serial[name] if intent is not None else 0
        for mate in [peer for peer in self.serving if self.stage[peer] == self.stage[name] and peer != name]:
            at = max(self.arrives.get((name, mate), 0.0), self.now + self.chance.uniform(0.0, 4.0))
            self.arrives[name, mate] = at
            if self.chance.random() < 0.8:
                known, machine = self.heard[name].get(mate, 0), self.movers[mate]
                told = (name, mate, machine, serial, known, intent is None)
                self.later(at - self.now, lambda told=told: self.hear(*told))

    def hear(self, name: PeerId, mate: PeerId, machine: Mover, serial: int, known: int, stays: bool) -> None:
        if self.movers.get(mate) is machine:
            self.heard[mate][name] = serial
            self.feed(mate, machine, GroupBeat(name, known == self.serial[mate], stays))


@settings(deadline=None)  # The machine may be slow.
@given(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.integers(0, 10_000))
def test_a_stage_is_never_emptied_by_moves_whatever_the_directory_says(peers, seed):
    Room(peers, seed).play(300.0)


def test_in_that_room_peers_do_move():
    room = Room([0, 0, 0, 1, 1, 2, 2, 2], 1)
    room.play(300.0)
    assert room.moves > 20
