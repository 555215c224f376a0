"""A group's rounds on a clock that is set by hand."""

from __future__ import annotations

import hashlib
import heapq
from random import Random

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import (
    AddContribution,
    Announced,
    ApplyRound,
    ChainArrived,
    ChainAsked,
    Contributed,
    ContributionArrived,
    FetchGroupState,
    GradientAccumulated,
    IdsAsked,
    MakeContribution,
    NeighbourJoined,
    NeighbourLeft,
    ProgressArrived,
    Reference,
    RemoveContribution,
    RequestChain,
    RequestContributions,
    RequestIds,
    RestoreToMomentum,
    SendAnnounce,
    SendChain,
    SendProgress,
    SettleRound,
    TimePassed,
)
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START
from swarmnet.run.schema import Rounds

RULES = Rounds(
    global_batch_tokens=100, max_seconds=5.0, contribution_timeout_seconds=1.0, window=3, snapshot_interval=8
)


class Group:
    """Peers of one group on one clock; every link has a delay, and may lose messages or be cut."""

    def __init__(self, count: int, seed: int = 0, loss: float = 0.0, longest_delay: float = 0.05) -> None:
        self.chance = Random(seed)
        self.now = 0.0
        self.loss = loss
        self.longest_delay = longest_delay
        self.queue: list[tuple[float, int, PeerId, object]] = []
        self.sequence = 0
        self.peers: dict[PeerId, GroupRounds] = {}
        self.made: dict[ContributionId, Reference] = {}
        self.bodies: dict[PeerId, set[ContributionId]] = {}
        self.weights: dict[PeerId, dict[int, set[ContributionId]]] = {}
        self.applied: dict[PeerId, list[int]] = {}
        self.chains: dict[PeerId, dict[int, bytes]] = {}
        self.given_back: dict[PeerId, list[ContributionId]] = {}
        self.settled: dict[PeerId, dict[int, tuple[Reference, ...]]] = {}
        self.resynchronised: list[tuple[PeerId, FetchGroupState]] = []
        self.frozen: set[PeerId] = set()
        self.cut: set[tuple[PeerId, PeerId]] = set()
        for number in range(count):
            self.join(PeerId(f"peer{number}"))

    def join(self, name: PeerId, settled: int = -1, like: PeerId | None = None) -> None:
        """A newcomer that starts from the snapshot of `like` after round `settled`."""
        chain = self.chains[like][settled] if like is not None else START
        machine = GroupRounds(rules=RULES, me=name, settled=settled, now=self.now, chain_value=chain)
        self.chains[name], self.given_back[name] = {}, []
        self.bodies[name], self.weights[name] = set(), {}
        self.applied[name], self.settled[name] = [], {}
        others = list(self.peers)
        self.peers[name] = machine
        for other in others:
            self.handle(name, NeighbourJoined(other))
            self.handle(other, NeighbourJoined(name))

    def leave(self, name: PeerId) -> None:
        del self.peers[name]
        for other in self.peers:
            self.handle(other, NeighbourLeft(name))

    def post(self, sender: PeerId, receiver: PeerId, event: object, reliable: bool = False) -> None:
        if (sender, receiver) in self.cut or (not reliable and self.chance.random() < self.loss):
            return
        self.sequence += 1
        due = self.now + self.chance.uniform(0.001, self.longest_delay)
        heapq.heappush(self.queue, (due, self.sequence, receiver, event))

    def handle(self, name: PeerId, event: object) -> None:
        for effect in self.peers[name].handle(event, self.now):
            self.carry_out(name, effect)

    def carry_out(self, me: PeerId, effect: object) -> None:
        match effect:
            case MakeContribution(round, _):
                identity = ContributionId(hashlib.sha256(f"{me}/{round}".encode()).digest()[:16])
                reference = Reference(round, me, identity, 1000)
                self.made[identity] = reference
                self.bodies[me].add(identity)
                self.post(me, me, Contributed(round, reference), reliable=True)
            case AddContribution(reference):
                held = self.weights[me].setdefault(reference.round, set())
                assert reference.id not in held, "a contribution was applied twice"
                held.add(reference.id)
            case RemoveContribution(round, peer):
                held = self.weights[me][round]
                held.remove(next(i for i in held if self.made[i].peer == peer))
            case ApplyRound(round, _, _):
                self.applied[me].append(round)
            case SettleRound(round, references, chain):
                self.chains[me][round] = chain
                self.settled[me][round] = references
                assert {r.id for r in references} == self.weights[me].get(round, set())
            case SendProgress():
                event = ProgressArrived(
                    me, effect.round, effect.tokens, frozenset(effect.contributed), effect.settled,
                    effect.in_step, effect.anchor_round, effect.anchor, effect.sets,
                )  # fmt: skip
                for peer in effect.peers:
                    self.post(me, peer, event)
            case SendChain(peer, first, before, sets):
                self.post(me, peer, ChainArrived(me, first, before, sets))
            case RequestChain(peer, last):
                self.post(me, peer, ChainAsked(me, last))
            case RestoreToMomentum(_, identity):
                self.given_back[me].append(identity)
            case SendAnnounce(peers, references, complete):
                for peer in peers:
                    self.post(me, peer, Announced(me, references, complete))
            case RequestContributions(peer, ids):
                for identity in ids:
                    if identity in self.bodies.get(peer, ()) and (me, peer) not in self.cut:
                        self.post(peer, me, ContributionArrived(peer, self.made[identity]))
            case RequestIds(peer, rounds):
                self.post(me, peer, IdsAsked(me, rounds))
            case FetchGroupState():
                self.resynchronised.append((me, effect))

    def run(self, seconds: float, tokens_per_second: float = 0.0) -> None:
        end = self.now + seconds
        work = dict.fromkeys(self.peers, self.now)
        while self.now < end:
            timers = [(machine.next_deadline(), name) for name, machine in self.peers.items()
                      if name not in self.frozen]  # fmt: skip
            if tokens_per_second:
                timers += [(work.setdefault(name, self.now), name) for name in self.peers]
            due, name = min(timers, default=(end, PeerId("")))
            if self.queue and self.queue[0][0] <= due:
                self.now, _, receiver, event = heapq.heappop(self.queue)
                frozen = receiver in self.frozen and not isinstance(event, Contributed)
                if receiver in self.peers and not frozen:
                    if isinstance(event, ContributionArrived):
                        self.bodies[receiver].add(event.reference.id)
                    self.handle(receiver, event)
                continue
            self.now = max(self.now, min(due, end))
            if self.now >= end:
                break
            if tokens_per_second and work.get(name, end) <= self.now:
                work[name] = self.now + self.chance.uniform(0.5, 1.5) * 10 / tokens_per_second
                if name not in self.frozen:
                    self.handle(name, GradientAccumulated(10))
            else:
                self.handle(name, TimePassed())

    def shared_rounds_are_equal(self) -> int:
        """How many rounds at least two peers have settled; all of them with the same set."""
        rounds = [number for sets in self.settled.values() for number in sets]
        shared = {number for number in rounds if rounds.count(number) > 1}
        for number in shared:
            sets = {sets[number] for sets in self.settled.values() if number in sets}
            assert len(sets) == 1, f"round {number} settled as {len(sets)} different sets"
        return len(shared)


def partitioned(group: Group, left: set[PeerId]) -> None:
    """Cut every link between `left` and the rest, as the machines see it."""
    for one in group.peers:
        for other in group.peers:
            if one != other and ((one in left) != (other in left)):
                group.cut.add((one, other))
                group.handle(one, NeighbourLeft(other))
