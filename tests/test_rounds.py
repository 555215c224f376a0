"""The group's rounds on a virtual clock: a few machines, messages shuttled between them by hand."""

from __future__ import annotations

import hashlib
import heapq
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.branches import START
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.manifest import Rounds
from swarmnet.round_events import (
    AddContribution,
    Announced,
    ApplyRound,
    AskChain,
    AskIds,
    ChainArrived,
    ChainAsked,
    Committed,
    Contributed,
    ContributionArrived,
    GiveBack,
    IdsAsked,
    MakeContribution,
    NeighbourJoined,
    NeighbourLeft,
    OpenSet,
    ProgressArrived,
    Reference,
    RemoveContribution,
    Resynchronise,
    SendAnnounce,
    SendChain,
    SendProgress,
    SettleRound,
    Tick,
    Want,
)
from swarmnet.round_sets import set_digest
from swarmnet.rounds import GroupRounds

RULES = Rounds(target_tokens=100, longest_seconds=5.0, deadline_seconds=1.0, window=3, snapshot_rounds=8)


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
        self.resynchronised: list[tuple[PeerId, Resynchronise]] = []
        self.frozen: set[PeerId] = set()
        self.cut: set[tuple[PeerId, PeerId]] = set()
        for number in range(count):
            self.join(PeerId(f"peer{number}"))

    def join(self, name: PeerId, settled: int = -1, like: PeerId | None = None) -> None:
        """A newcomer that starts from the snapshot of `like` after round `settled`."""
        chain = self.chains[like][settled] if like is not None else START
        machine = GroupRounds(RULES, name, settled, self.now, chain)
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
            case AskChain(peer, last):
                self.post(me, peer, ChainAsked(me, last))
            case GiveBack(_, identity):
                self.given_back[me].append(identity)
            case SendAnnounce(peers, references, complete):
                for peer in peers:
                    self.post(me, peer, Announced(me, references, complete))
            case Want(peer, ids):
                for identity in ids:
                    if identity in self.bodies.get(peer, ()) and (me, peer) not in self.cut:
                        self.post(peer, me, ContributionArrived(peer, self.made[identity]))
            case AskIds(peer, rounds):
                self.post(me, peer, IdsAsked(me, rounds))
            case Resynchronise():
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
                    self.handle(name, Committed(10))
            else:
                self.handle(name, Tick())

    def shared_rounds_are_equal(self) -> int:
        """How many rounds at least two peers have settled; all of them with the same set."""
        rounds = [number for sets in self.settled.values() for number in sets]
        shared = {number for number in rounds if rounds.count(number) > 1}
        for number in shared:
            sets = {sets[number] for sets in self.settled.values() if number in sets}
            assert len(sets) == 1, f"round {number} settled as {len(sets)} different sets"
        return len(shared)


def test_a_peer_alone_contributes_applies_and_settles() -> None:
    group = Group(1)
    group.run(10.0, tokens_per_second=100)
    only = group.peers[PeerId("peer0")]
    assert only.settled >= 4
    assert group.applied[PeerId("peer0")] == list(range(only.applied + 1))


def test_peers_settle_the_same_sets_and_nothing_is_left_out() -> None:
    group = Group(4)
    group.run(20.0, tokens_per_second=50)
    assert group.shared_rounds_are_equal() >= 20
    settled = {reference.id for sets in group.settled[PeerId("peer0")].values() for reference in sets}
    last = group.peers[PeerId("peer0")].settled
    assert settled == {i for i, reference in group.made.items() if reference.round <= last}


def test_a_slow_peer_delays_a_round_only_until_the_deadline() -> None:
    group = Group(2)
    group.run(1.0, tokens_per_second=50)
    group.frozen.add(PeerId("peer1"))
    before = len(group.applied[PeerId("peer0")])
    group.run(6.0, tokens_per_second=100)
    assert len(group.applied[PeerId("peer0")]) >= before + 3


def test_a_frozen_peer_that_thaws_adopts_what_the_others_settled() -> None:
    group = Group(3)
    frozen = PeerId("peer2")
    group.run(5.0, tokens_per_second=50)
    group.frozen.add(frozen)
    for other in ("peer0", "peer1"):
        group.handle(PeerId(other), NeighbourLeft(frozen))
    group.run(8.0, tokens_per_second=50)
    group.frozen.clear()
    for other in ("peer0", "peer1"):
        group.handle(PeerId(other), NeighbourJoined(frozen))
    group.run(10.0, tokens_per_second=50)
    assert group.peers[frozen].in_step
    assert group.peers[frozen].settled >= group.peers[PeerId("peer0")].settled - 2
    assert group.shared_rounds_are_equal() >= 20


def test_a_newcomer_catches_up_from_a_snapshot_by_contributions_alone() -> None:
    group = Group(3)
    group.run(10.0, tokens_per_second=50)
    snapshot = group.peers[PeerId("peer0")].settled - 10
    group.join(PeerId("late"), settled=snapshot, like=PeerId("peer0"))
    group.run(10.0, tokens_per_second=50)
    late = group.peers[PeerId("late")]
    assert late.in_step
    assert late.settled >= group.peers[PeerId("peer0")].settled - 2
    settled = group.settled[PeerId("peer0")].values()
    assert any(reference.peer == "late" for references in settled for reference in references)
    group.shared_rounds_are_equal()


def test_who_is_too_far_behind_is_told_to_fetch_the_state() -> None:
    group = Group(2)
    group.run(60.0, tokens_per_second=60)
    assert group.peers[PeerId("peer0")].settled > 30
    group.join(PeerId("late"), settled=-1)
    group.run(1.0, tokens_per_second=60)
    assert PeerId("late") in [peer for peer, _ in group.resynchronised]


@pytest.mark.parametrize("size", [2, 5])
def test_a_peer_that_dies_in_the_middle_leaves_equal_sets(size: int) -> None:
    group = Group(size, seed=size)
    group.run(7.3, tokens_per_second=60)
    group.leave(PeerId("peer1"))
    group.run(15.0, tokens_per_second=60)
    assert group.shared_rounds_are_equal() >= 4
    survivor = group.peers[PeerId("peer0")]
    assert survivor.applied >= 15


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 5), st.integers(0, 10**6), st.floats(0, 0.3), st.floats(0.01, 0.5), st.floats(20, 200)
)
def test_lost_and_late_messages_never_split_the_settled_sets(
    size: int, seed: int, loss: float, delay: float, speed: float
) -> None:
    group = Group(size, seed, loss, delay)
    group.run(15.0, tokens_per_second=speed)
    group.loss = 0.0
    group.run(15.0)
    group.shared_rounds_are_equal()
    assert len({machine.current for machine in group.peers.values()}) == 1, "they end in the same round"
    assert all(machine.applied == machine.current - 1 for machine in group.peers.values())


def test_of_two_contributions_by_one_peer_the_smaller_id_counts() -> None:
    machine = GroupRounds(RULES, PeerId("me"), -1, 0.0)
    machine.handle(NeighbourJoined(PeerId("other")), 0.0)
    hello = ProgressArrived(PeerId("other"), 0, 0, frozenset(), -1, True, -1, START, ())
    machine.handle(hello, 0.0)
    large = Reference(0, PeerId("liar"), ContributionId(b"\xff" * 16), 10)
    small = Reference(0, PeerId("liar"), ContributionId(b"\x00" * 16), 10)
    assert AddContribution(large) in machine.handle(ContributionArrived(PeerId("other"), large), 0.1)
    effects = machine.handle(ContributionArrived(PeerId("other"), small), 0.2)
    assert RemoveContribution(0, PeerId("liar")) in effects
    assert AddContribution(small) in effects
    assert AddContribution(large) not in machine.handle(ContributionArrived(PeerId("other"), large), 0.3)


def settled_by(peer: PeerId, *references: Reference) -> ProgressArrived:
    """It has settled round 0 with these."""
    sets = (OpenSet(0, 1, 1, len(references), set_digest(entry.id for entry in references)),)
    return ProgressArrived(peer, 9, 0, frozenset(), 0, True, -1, START, sets)


def test_a_settled_set_stands_against_the_smaller_id_of_a_later_life_of_its_maker() -> None:
    me, other = PeerId("me"), PeerId("other")
    settled = Reference(0, me, ContributionId(b"\xff" * 16), 10)
    anew = Reference(0, me, ContributionId(b"\x00" * 16), 10)
    machine = GroupRounds(RULES, me, -1, 0.0)
    machine.handle(NeighbourJoined(other), 0.0)
    machine.handle(settled_by(other, settled), 0.0)
    machine.handle(ContributionArrived(other, anew), 0.1)
    effects = machine.handle(Announced(other, (settled,), complete=(0,)), 0.2)
    assert RemoveContribution(0, me) in effects
    assert Want(other, (settled.id,)) in effects
    assert AddContribution(settled) in machine.handle(ContributionArrived(other, settled), 0.3)


def test_only_who_has_settled_a_round_can_tell_that_something_is_not_in_it() -> None:
    me, other = PeerId("me"), PeerId("other")
    machine = GroupRounds(RULES, me, -1, 0.0)
    machine.handle(NeighbourJoined(other), 0.0)
    machine.handle(ProgressArrived(other, 0, 0, frozenset(), -1, True, -1, START, ()), 0.0)
    held = Reference(0, PeerId("third"), ContributionId(b"\x07" * 16), 10)
    machine.handle(ContributionArrived(other, held), 0.1)
    nothing = Announced(other, (), complete=(0,))
    assert RemoveContribution(0, PeerId("third")) not in machine.handle(nothing, 0.2)
    machine.handle(settled_by(other), 0.3)
    assert RemoveContribution(0, PeerId("third")) in machine.handle(nothing, 0.4)


def partitioned(group: Group, left: set[PeerId]) -> None:
    """Cut every link between `left` and the rest, as the machines see it."""
    for one in group.peers:
        for other in group.peers:
            if one != other and ((one in left) != (other in left)):
                group.cut.add((one, other))
                group.handle(one, NeighbourLeft(other))


def healed(group: Group) -> None:
    group.cut.clear()
    for one in group.peers:
        for other in group.peers:
            if one != other:
                group.handle(one, NeighbourJoined(other))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 7), st.data(), st.integers(0, 10**6), st.floats(4, 40))
def test_after_a_partition_every_peer_names_the_same_branch(
    size: int, data: st.DataObject, seed: int, seconds: float
) -> None:
    group = Group(size, seed)
    left = {PeerId(f"peer{n}") for n in range(data.draw(st.integers(1, size - 1)))}
    group.run(6.0, tokens_per_second=60)
    partitioned(group, left)
    group.run(seconds, tokens_per_second=60)
    group.resynchronised.clear()
    healed(group)
    group.run(3.0, tokens_per_second=60)
    gave_up = {peer for peer, effect in group.resynchronised}
    stays = set(group.peers) - gave_up
    assert stays, "somebody's history stands"
    chains = [group.peers[peer].chain for peer in stays]
    shared = min(chain.round for chain in chains)
    assert len({chain.at(shared) for chain in chains}) == 1, "those that stay share one history"
    for peer, effect in group.resynchronised:
        assert peer in gave_up
        assert not set(effect.peers) <= gave_up - {peer} or len(gave_up) < len(group.peers)


def test_two_halves_trace_their_fork_to_the_same_round() -> None:
    group = Group(4, seed=3)
    group.run(6.0, tokens_per_second=60)
    left = {PeerId("peer0"), PeerId("peer1")}
    partitioned(group, left)
    group.run(100.0, tokens_per_second=60)  # Far more rounds than Progress tells.
    healed(group)
    group.run(3.0, tokens_per_second=60)
    forks = {effect.fork_round for _, effect in group.resynchronised}
    assert len(forks) == 1
    (fork,) = forks
    assert fork is not None
    losers = {peer for peer, _ in group.resynchronised}
    assert losers in (left, set(group.peers) - left)
    for round in range(fork):
        assert len({chains[round] for chains in group.chains.values()}) == 1
    assert len({chains[fork] for chains in group.chains.values()}) == 2


def test_a_link_that_breaks_for_a_moment_does_not_part_two_histories() -> None:
    """What one holds and the other lacks at that moment must not settle at one of them."""
    for seed in range(5):
        group = Group(2, seed=seed)
        one = next(iter(group.peers))
        group.run(5.0, tokens_per_second=60)
        for _ in range(6):
            partitioned(group, {one})
            group.run(group.chance.uniform(0.2, 1.5), tokens_per_second=60)
            healed(group)
            group.run(2.0, tokens_per_second=60)
        assert not group.resynchronised
        assert group.shared_rounds_are_equal() >= 10
