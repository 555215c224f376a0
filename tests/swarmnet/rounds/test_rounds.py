"""The group's rounds on a virtual clock: a few machines, messages shuttled between them by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_group import RULES, Group, partitioned

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import set_digest
from swarmnet.rounds.events import (
    AddContribution,
    Announced,
    ContributionArrived,
    GradientAccumulated,
    NeighbourJoined,
    NeighbourLeft,
    OpenSet,
    ProgressArrived,
    Reference,
    RemoveContribution,
    RequestContributions,
    TimePassed,
)
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START


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


@pytest.mark.parametrize(("peers", "loss", "tokens_per_second"), [(4, 0.0, 100), (4, 0.2, 100), (1, 0.0, 3)])
def test_nothing_is_left_undone_by_a_commit_that_is_only_counted(
    peers: int, loss: float, tokens_per_second: int
) -> None:
    looked_again = 0

    class LooksAgain(Group):
        def handle(self, name: PeerId, event: object) -> None:
            super().handle(name, event)
            if isinstance(event, GradientAccumulated):
                nonlocal looked_again
                looked_again += 1
                machine = self.peers[name]
                due = machine.next_deadline()
                assert machine.handle(TimePassed(), self.now) == []
                assert machine.next_deadline() == due

    group = LooksAgain(peers, loss=loss)
    group.run(2000.0 / tokens_per_second, tokens_per_second)
    assert min(machine.settled for machine in group.peers.values()) >= 10
    assert looked_again >= 100 * peers


def test_a_round_is_closed_in_time_though_its_first_commit_comes_late_and_fills_little() -> None:
    machine = GroupRounds(
        rules=replace(RULES, global_batch_tokens=10**6), me=PeerId("peer0"), settled=-1, now=0.0
    )
    machine.handle(TimePassed(), 4.5)
    assert machine.next_deadline() > 5.0, "nothing is there that could be closed"
    assert machine.handle(GradientAccumulated(10), 4.7) == []
    assert machine.next_deadline() == 5.0 == RULES.max_seconds


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


@settings(max_examples=max(1, settings.default.max_examples // 3))
@given(st.integers(2, 5), st.integers(0, 10**6), st.floats(0, 0.3), st.floats(0.01, 0.5), st.floats(20, 200))
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
    machine = GroupRounds(rules=RULES, me=PeerId("me"), settled=-1, now=0.0)
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
    machine = GroupRounds(rules=RULES, me=me, settled=-1, now=0.0)
    machine.handle(NeighbourJoined(other), 0.0)
    machine.handle(settled_by(other, settled), 0.0)
    machine.handle(ContributionArrived(other, anew), 0.1)
    effects = machine.handle(Announced(other, (settled,), complete=(0,)), 0.2)
    assert RemoveContribution(0, me) in effects
    assert RequestContributions(other, (settled.id,)) in effects
    assert AddContribution(settled) in machine.handle(ContributionArrived(other, settled), 0.3)


def test_only_who_has_settled_a_round_can_tell_that_something_is_not_in_it() -> None:
    me, other = PeerId("me"), PeerId("other")
    machine = GroupRounds(rules=RULES, me=me, settled=-1, now=0.0)
    machine.handle(NeighbourJoined(other), 0.0)
    machine.handle(ProgressArrived(other, 0, 0, frozenset(), -1, True, -1, START, ()), 0.0)
    held = Reference(0, PeerId("third"), ContributionId(b"\x07" * 16), 10)
    machine.handle(ContributionArrived(other, held), 0.1)
    nothing = Announced(other, (), complete=(0,))
    assert RemoveContribution(0, PeerId("third")) not in machine.handle(nothing, 0.2)
    machine.handle(settled_by(other), 0.3)
    assert RemoveContribution(0, PeerId("third")) in machine.handle(nothing, 0.4)


def healed(group: Group) -> None:
    group.cut.clear()
    for one in group.peers:
        for other in group.peers:
            if one != other:
                group.handle(one, NeighbourJoined(other))


@settings(max_examples=max(1, settings.default.max_examples // 3))
@given(st.integers(2, 7), st.data(), st.integers(0, 10**6), st.floats(4, 20))
@pytest.mark.slow
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
