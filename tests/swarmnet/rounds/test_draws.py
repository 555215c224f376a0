"""From which settled round a draw of reducers follows, who waits for it, and how a newcomer learns it; and
results that name contributors who do not belong to the group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.contributors import LOOK_SECONDS
from swarmnet.rounds.events import (
    Announced,
    ChainArrived,
    ContributionArrived,
    GradientAccumulated,
    GroupSizeChanged,
    LeaveGroup,
    MakeContribution,
    NeighbourJoined,
    ProgressArrived,
    Reference,
    RequestChain,
    RequestContributions,
    TimePassed,
    UnknownPeersNamed,
)
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START, Chain, SettledSet
from swarmnet.rounds.reducing import ASK_SECONDS, SEARCH_SECONDS, ReductionSchedule
from swarmnet.rounds.result_table import Draw
from swarmnet.run.schema import Rounds

RULES = Rounds(window=2, snapshot_interval=4, global_batch_tokens=100)
DRAW = Draw(b"run", RULES.snapshot_interval, 16, RULES.window)
ME, A, B, STRANGER = (PeerId(name) for name in ("me", "a", "b", "stranger"))
MEMBERS = frozenset((ME, A, B))


def history(last: int, branch: str = "x") -> Chain:
    chain = Chain()
    for round in range(last + 1):
        chain.append(SettledSet(1, f"{branch}{round:011}".encode()))
    return chain


def newcomer(settled: int, branch: str = "x") -> Chain:
    """Of a peer that has fetched the state after a round: of earlier ones it knows nothing."""
    return Chain(settled, history(settled, branch).value)


def reducing(chain: Chain, *same_branch_peers: PeerId) -> ReductionSchedule:
    made = ReductionSchedule(
        rules=RULES,
        draw=DRAW,
        me=ME,
        same_branch_peers={branch_peer: NeighbourView(linked_at=0.0) for branch_peer in same_branch_peers},
        chain=chain,
    )
    made.members = MEMBERS
    return made


@given(st.integers(0, 30), st.integers(0, 31), st.integers(0, 30), st.integers(0, 5))
def test_older_sets_are_learned_if_they_lead_to_what_is_known(at, first, last, lie):
    elder, young = history(30), newcomer(at)
    sets = list(elder.part(first, last))
    if lie and lie <= len(sets):
        sets[-lie] = SettledSet(2, sets[-lie].digest)
    is_true = not (lie and lie <= len(sets) and len(sets) - lie < at + 1 - first)
    learned = young.learn(first, elder.at(first - 1) or START, sets)
    assert learned == (is_true and first <= at <= last)
    for round in range(-1, 31):
        known = first - 1 <= round <= at if learned else round == at
        assert young.at(round) == (elder.at(round) if known else None)
    assert (young.start, young.round) == (at, at), "it still cannot answer for their sets"


def test_all_who_settled_the_round_before_a_block_draw_the_same_and_who_settled_another_does_not():
    elder, late, other = (reducing(history(*of)) for of in ((9,), (5,), (9, "y")))
    assert elder.reducers(8) == late.reducers(8) == reducing(history(5)).reducers(11)
    assert elder.reducers(8) != other.reducers(8)
    assert not reducing(history(4)).knows(8), "round 5 decides"
    assert all(reducing(Chain()).knows(round) for round in range(4)), "the first from the run's id alone"


def test_a_newcomer_asks_one_ally_after_the_other_until_it_knows_the_draw():
    young = reducing(newcomer(7), A, B)
    assert not young.knows(8)
    asked = [young.asks(8, now) for now in (0.0, 0.5, ASK_SECONDS, 2 * ASK_SECONDS)]
    assert asked == [[RequestChain(A, 7)], [], [RequestChain(B, 7)], [RequestChain(A, 7)]]
    assert young.next_deadline() == 3 * ASK_SECONDS
    young.chain.learn(0, START, history(7).part(0, 7))
    assert young.asks(8, 9.0) == []
    assert young.next_deadline() == float("inf")
    assert young.reducers(8) == reducing(history(9)).reducers(8)


def test_where_nobody_knows_what_was_before_all_draw_by_the_state_that_they_began_with():
    """A group that begins anew from an archive."""
    first, second = reducing(newcomer(7), A), reducing(newcomer(7))
    for one in (first, second):
        one.asks(8, 0.0)
        assert not one.knows(8)
        assert one.asks(8, SEARCH_SECONDS) == []
    assert first.reducers(8) == second.reducers(8)
    assert not first.knows(12), "the next block is drawn by what settles now"


def machine_at(chain: Chain) -> GroupRounds:
    machine = GroupRounds(
        rules=RULES,
        me=ME,
        settled=chain.round,
        now=0.0,
        chain_value=chain.value,
        draw=DRAW,
        is_member=lambda peer: peer in MEMBERS,
    )
    for peer in (A, B):
        machine.handle(NeighbourJoined(peer), 0.0)
        anchor = max(-1, chain.round)
        told = ProgressArrived(
            peer, chain.round + 1, 0, frozenset(), chain.round, True, anchor, chain.value, ()
        )  # fmt: skip
        machine.handle(told, 0.0)
    machine.handle(GroupSizeChanged(3, MEMBERS), 0.0)
    return machine


@pytest.mark.parametrize(
    "event", [GradientAccumulated(100), LeaveGroup()], ids=["enough tokens", "it leaves"]
)
def test_what_a_newcomer_has_gathered_waits_for_the_draw_and_is_not_lost(event):
    machine = machine_at(newcomer(7))
    machine.handle(GradientAccumulated(10), 0.1)
    effects = machine.handle(event, 0.2)
    assert not [effect for effect in effects if isinstance(effect, MakeContribution)]
    assert isinstance(event, GradientAccumulated) or not machine.handed_over()
    elder = history(9)
    effects = machine.handle(ChainArrived(A, 0, START, tuple(elder.part(0, 9))), 0.3)
    (made,) = (effect for effect in effects if isinstance(effect, MakeContribution))
    assert made.reducers == DRAW.reducers(8, MEMBERS, elder.at(5))


RESULT = Reference(8, A, ContributionId(b"r" * 16), 100)


def test_a_result_that_names_strangers_waits_until_they_are_members_or_half_of_the_group_holds_it():
    members = set(MEMBERS)
    for decided in (False, True):
        machine = machine_at(history(7))
        machine.admission.waiting._is_member = members.__contains__
        assert machine.takes(RESULT)
        machine.handle(UnknownPeersNamed(A, RESULT, (STRANGER,)), 0.1)
        assert not machine.takes(RESULT)
        machine.handle(ContributionArrived(A, RESULT), 0.2)
        assert 8 not in machine.rounds or not machine.rounds[8].held
        if decided:
            effects = machine.handle(Announced(B, (RESULT,)), 0.3)
        else:
            members.add(STRANGER)
            effects = machine.handle(TimePassed(), 0.3 + LOOK_SECONDS)
            members.discard(STRANGER)
        assert [effect for effect in effects if isinstance(effect, RequestContributions)]
