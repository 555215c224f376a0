"""A swarm whose machines come and go, as capacities: what moving between stages is worth.

A stage does in a second what its serving peers do together, and the swarm what its poorest stage does. The
real `Mover` decides for each peer, on what the directory shows: a record is seen `SEEN_SECONDS` after it was
stored, and a dead peer's for up to `FRESH_SECONDS`. Who fetches a stage serves nobody meanwhile.
Times in seconds, capacities in those of the fastest machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from peers.lab.bench.preemption_trace import Machine
from protocols.signed.records import ANNOUNCE_SECONDS
from swarmnet.identifiers import PeerId
from swarmnet.placement.machine import (
    AnnounceMove,
    Go,
    GroupBeat,
    Look,
    Looked,
    MoveEvent,
    Mover,
    Tick,
    Withdraw,
)
from swarmnet.placement.policy import (
    FRESH_SECONDS,
    Intent,
    MoveRules,
    View,
    choose_stage,
)

SEEN_SECONDS = 4.0
"""From storing a record to everybody seeing it: measured 0.02 s, and 6 s with two silent nodes on the way."""
LOOKING_SECONDS = 1.0
BEAT_SECONDS = 1.0
MATES_HEARD = 3
SCATTER = 0.05
"""Of measured speeds: standard deviation of their logarithm."""


@dataclass(frozen=True, slots=True)
class Setting:
    stages: int = 8
    rules: MoveRules | None = None
    """None: nobody moves by its own decision."""
    longest_period_seconds: float = 300.0
    one_per_period: bool = False
    """SWARM's own rule instead, with loads that are exact and of this instant: each period, one peer of the
    richest stage goes to the poorest."""
    random_newcomers: bool = False
    """They take any stage."""
    download_seconds: float = 60.0
    """Mean; one download takes 0.5 to 1.5 of it."""


@dataclass(slots=True)
class Outcome:
    """Integrals over the trace."""

    done: float = 0.0
    best: float = 0.0
    """What the best assignment of those present would have done at every instant, fetching nothing."""
    peer_hours: float = 0.0
    moves: int = 0
    most_moves_in_an_hour: int = 0
    """Of one peer, in any 3600 s."""
    returns: int = 0
    """Moves back to a stage that the peer had left within an hour: oscillation."""
    moving_hours: float = 0.0
    """Peer-hours in which somebody fetched another stage and served none."""
    announced: int = 0
    emptied: int = 0
    """Moves that left a stage without a serving peer. Never."""
    fewest: int = 0
    most: int = 0

    @property
    def share(self) -> float:
        return self.done / self.best


@dataclass(slots=True)
class Peer:
    machine: Machine
    name: PeerId
    stage: int = -1
    serving: bool = False
    mover: Mover | None = None
    moves: list[tuple[float, int]] = field(default_factory=list)
    """(when, which stage it left)"""


class Directory:
    """What everybody sees, kept as sums (so `View.usual` is the mean). One record per peer: (stage, rate,
    moving to)."""

    def __init__(self, stages: int) -> None:
        self.capacities = [0.0] * stages
        self.records: dict[PeerId, tuple[int, float, int]] = {}
        self.moving: dict[PeerId, Intent] = {}
        self._view: View | None = None

    def show(self, name: PeerId, record: tuple[int, float, int] | None) -> None:
        old = self.records.pop(name, None)
        self.moving.pop(name, None)
        self._view = None
        if old is not None:
            self.capacities[old[0]] -= old[1]
        if record is not None:
            stage, rate, target = record
            self.records[name] = record
            self.capacities[stage] += rate
            if target >= 0:
                self.moving[name] = Intent(name, stage, target, rate, rate)

    def view(self) -> View:
        if self._view is None:
            capacities = tuple(max(0.0, capacity) for capacity in self.capacities)
            peers = len(self.records)
            usual = sum(capacities) / max(1, peers)
            self._view = View(capacities, tuple(self.moving.values()), peers, usual)
        return self._view


class World:
    def __init__(self, setting: Setting, machines: Sequence[Machine], end: float, seed: int) -> None:
        self.setting = setting
        self.end = end
        self.chance = Random(f"moving/{seed}")
        self.now = 0.0
        self.outcome = Outcome(fewest=len(machines))
        self.directory = Directory(setting.stages)
        self.here: list[dict[PeerId, Peer]] = [{} for _ in range(setting.stages)]
        """Who serves each stage."""
        self.present: dict[PeerId, Peer] = {}
        self._capacity = [0.0] * setting.stages
        self._alike = len({machine.speed for machine in machines}) == 1
        self._speed = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        began = [machine for machine in machines if machine.comes_at == 0.0]
        for place, machine in enumerate(began):
            self._begin(machine, place % setting.stages)
        for machine in machines:
            if machine.comes_at > 0.0:
                self._at(machine.comes_at, partial(self._come, machine))
        if setting.one_per_period:
            self._at(setting.longest_period_seconds, self._move_one)

    def play(self) -> Outcome:
        """The whole trace."""
        while self._heap and self._heap[0][0] < self.end:
            at, _, action = heapq.heappop(self._heap)
            self._count(at)
            action()
        self._count(self.end)
        return self.outcome

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def _count(self, until: float) -> None:
        seconds, self.now = until - self.now, until
        if seconds <= 0.0:
            return
        count, stages = len(self.present), self.setting.stages
        outcome = self.outcome
        outcome.done += seconds * min(self._capacity)
        outcome.best += seconds * (count // stages * self._speed / max(1, count) if self._alike
                                   else self._speed / stages)  # fmt: skip
        outcome.peer_hours += seconds * count / 3600
        outcome.fewest, outcome.most = min(outcome.fewest, count), max(outcome.most, count)

    # -- machines come and go -------------------------------------------------------------------------

    def _begin(self, machine: Machine, stage: int) -> None:
        peer = self._arrive(machine, stage)
        self._serve(peer)
        self._show(peer)
        self._mover(peer, self.chance.uniform(0.0, self.setting.longest_period_seconds))

    def _come(self, machine: Machine) -> None:
        if self.setting.random_newcomers:
            stage = self.chance.randrange(self.setting.stages)
        else:
            rules = self.setting.rules or _rules(self.setting.stages)
            stage = choose_stage(self.directory.view(), rules, self.chance)
        peer = self._arrive(machine, stage)
        self._publish(peer)
        self._fetch(peer)

    def _arrive(self, machine: Machine, stage: int) -> Peer:
        peer = Peer(machine, PeerId(f"machine {machine.number}"), stage)
        self.present[peer.name] = peer
        self._speed += machine.speed
        self._at(machine.goes_at, lambda: self._go(peer))
        return peer

    def _go(self, peer: Peer) -> None:
        """Preempted: it says nothing, and its last record counts until it is old."""
        del self.present[peer.name]
        self._speed -= peer.machine.speed
        self._stop(peer)
        peer.mover = None
        stored = self.chance.uniform(0.0, ANNOUNCE_SECONDS)
        self._at(self.now + FRESH_SECONDS - stored, lambda: self.directory.show(peer.name, None))

    def _serve(self, peer: Peer) -> None:
        peer.serving = True
        self.here[peer.stage][peer.name] = peer
        self._capacity[peer.stage] = sum(other.machine.speed for other in self.here[peer.stage].values())

    def _stop(self, peer: Peer) -> None:
        if peer.serving:
            peer.serving = False
            del self.here[peer.stage][peer.name]
            self._capacity[peer.stage] = sum(other.machine.speed for other in self.here[peer.stage].values())

    def _fetch(self, peer: Peer, moved: bool = False) -> None:
        seconds = self.setting.download_seconds * self.chance.uniform(0.5, 1.5)
        began = self.now

        def fetched() -> None:
            if moved:
                until = min(self.now, peer.machine.goes_at)
                self.outcome.moving_hours += (until - began) / 3600
            if peer.name in self.present:
                self._serve(peer)
                rules = self.setting.rules
                self._mover(peer, self.now + (rules.cool_down(seconds, len(peer.moves)) if rules else 0.0))

        self._at(self.now + seconds, fetched)

    # -- what is published ----------------------------------------------------------------------------

    def _record(self, peer: Peer) -> tuple[int, float, int]:
        measured = peer.machine.speed * self.chance.lognormvariate(0.0, SCATTER)
        intent = peer.mover.intent if peer.mover is not None else None
        return (peer.stage, measured, intent.target if intent is not None else -1)

    def _show(self, peer: Peer) -> None:
        self.directory.show(peer.name, self._record(peer))

    def _publish(self, peer: Peer) -> None:
        record = self._record(peer)

        def seen() -> None:
            if peer.name in self.present:
                self.directory.show(peer.name, record)

        self._at(self.now + SEEN_SECONDS, seen)

    # -- SWARM's rule ---------------------------------------------------------------------------------

    def _move_one(self) -> None:
        self._at(self.now + self.setting.longest_period_seconds, self._move_one)
        poorest = min(range(self.setting.stages), key=self._capacity.__getitem__)
        richest = max(range(self.setting.stages), key=self._capacity.__getitem__)
        if self._capacity[poorest] < self._capacity[richest]:
            self._move(self.chance.choice(list(self.here[richest].values())), poorest)

    # -- ours -----------------------------------------------------------------------------------------

    def _mover(self, peer: Peer, rests_until: float) -> None:
        rules = self.setting.rules
        if rules is not None:
            peer.mover = Mover(
                peer.name, peer.stage, rules, self.chance, rests_until, self.setting.download_seconds
            )
            self._wake(peer, peer.mover)

    def _wake(self, peer: Peer, mover: Mover) -> None:
        due = mover.next_deadline()
        if due < self.end:
            self._at(due, lambda: self._feed(peer, mover, Tick()))

    def _feed(self, peer: Peer, mover: Mover, event: MoveEvent) -> None:
        if peer.mover is not mover:
            return  # It has died, or moved.
        due, was = mover.next_deadline(), mover.phase
        for effect in mover.handle(event, self.now):
            match effect:
                case Look():
                    self._at(self.now + LOOKING_SECONDS, lambda: self._feed(peer, mover, self._looked(peer)))
                case AnnounceMove():
                    self.outcome.announced += 1
                    self._publish(peer)
                case Withdraw():
                    self._publish(peer)
                case Go(stage):
                    self._move(peer, stage)
                    return
        if mover.phase == "confirming" and was != "confirming":
            self._at(self.now + BEAT_SECONDS, lambda: self._hear(peer, mover))
        if mover.next_deadline() != due:
            self._wake(peer, mover)

    def _looked(self, peer: Peer) -> Looked:
        return Looked(self.directory.view(), self._record(peer)[1])

    def _hear(self, peer: Peer, mover: Mover) -> None:
        """Beats of peers of its stage, after its announcement."""
        mates = [mate for mate in self.here[peer.stage].values() if mate is not peer]
        for mate in self.chance.sample(mates, min(MATES_HEARD, len(mates))):
            stays = mate.mover is None or mate.mover.intent is None
            self._feed(peer, mover, GroupBeat(mate.name, True, stays))

    def _move(self, peer: Peer, stage: int) -> None:
        outcome = self.outcome
        if not peer.serving or len(self.here[peer.stage]) < 2:
            outcome.emptied += 1
        hour = [entry for entry in peer.moves if entry[0] > self.now - 3600]
        outcome.moves += 1
        outcome.most_moves_in_an_hour = max(outcome.most_moves_in_an_hour, len(hour) + 1)
        outcome.returns += any(left == stage for _, left in hour)
        peer.moves.append((self.now, peer.stage))
        self._stop(peer)
        peer.stage, peer.mover = stage, None
        self._publish(peer)
        self._fetch(peer, moved=True)


def _rules(stages: int) -> MoveRules:
    return MoveRules((1.0,) * stages)
