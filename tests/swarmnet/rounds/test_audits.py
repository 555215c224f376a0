"""Which results a peer looks into, what it asks for, and whom it tells that somebody has lied."""

from __future__ import annotations

import pytest

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.audits import AUDITS, MAX_OF_RESULT, MAX_OPEN, MAX_PROOFS, AuditQuery, Audits
from swarmnet.rounds.contribution_sets import RoundSet
from swarmnet.rounds.events import (
    Announced,
    ContributionArrived,
    Convicted,
    NeighbourJoined,
    OpenSet,
    ProgressArrived,
    Reference,
    RemoveContribution,
    RequestContributions,
    Unanswered,
)
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START, SettledSet
from swarmnet.rounds.result_table import Contributor, Draw, Table
from swarmnet.run.schema import Rounds

A, B, C, LIAR = (PeerId(name) for name in ("a", "b", "c", "liar"))
SHARDS = 16


def name(number: int) -> ContributionId:
    return ContributionId(number.to_bytes(16, "big"))


def table_of(*shards: int) -> Table:
    return Table({shard: frozenset((Contributor.of(A, name(1), 1),)) for shard in shards})


def own(number: int = 0, contributor: PeerId = LIAR, shard: int = 0, until: float = 10.0) -> AuditQuery:
    return AuditQuery((name(number), shard), 5, contributor, contributor, until)


def proof(asked: PeerId, number: int = 0, contributor: PeerId = LIAR) -> AuditQuery:
    return AuditQuery((name(number), 0), 5, contributor, asked, 10.0)


@pytest.mark.parametrize("peers", [3, 8, 64])
def test_a_shard_is_looked_into_as_often_in_a_group_of_any_size(peers):
    auditors = [Audits(bytes([number]), 2) for number in range(peers - 1)]
    results = 200
    table = table_of(0, 7)
    drawn = sum(len(one.drawn(name(n), table, peers)) for one in auditors for n in range(results))
    assert drawn / (2 * results) == pytest.approx(AUDITS, rel=0.2)


def test_who_looks_into_what_follows_from_what_is_published_and_a_secret_of_its_own():
    table = table_of(*range(SHARDS))
    one, other = Audits(b"one", 2), Audits(b"other", 2)
    mine = [one.drawn(name(number), table, 8) for number in range(40)]
    assert mine == [Audits(b"one", 2).drawn(name(number), table, 8) for number in range(40)]
    assert len(set(mine)) > 10, "another one of the same maker is looked into otherwise"
    assert mine != [other.drawn(name(number), table, 8) for number in range(40)]
    assert max(len(one.drawn(name(number), table, 2)) for number in range(40)) == MAX_OF_RESULT


def test_questions_are_bounded_and_end_without_an_answer():
    audits = Audits(b"secret", 2)
    assert all(audits.ask(own(number, until=10.0 + number)) for number in range(MAX_OPEN))
    assert not audits.ask(own(99)), "there is no room"
    assert audits.overdue(9.0) == []
    assert [question.name for question in audits.overdue(11.0)] == [(name(0), 0), (name(1), 0)]
    assert audits.pending_query(LIAR, (name(1), 0)) is None
    assert audits.ask(own(99))
    assert not audits.ask(own(99)), "once is enough"
    audits.left(LIAR)
    assert audits.overdue(1e9) == [], "who is gone is not blamed"


def test_of_a_liar_one_proof_is_asked_for_at_a_time_and_of_a_peer_one():
    audits = Audits(b"secret", 2)
    assert audits.ask(proof(A))
    assert not audits.ask(proof(B)), "a has it"
    assert not audits.ask(proof(A, 2, C)), "a is busy"
    assert audits.ask(proof(B, 2, C))


def test_who_offers_a_proof_that_is_none_is_asked_for_no_other():
    audits = Audits(b"secret", 2)
    question = proof(A)
    assert audits.ask(question)
    audits.end(question)
    audits.record_invalid_proof(question)
    assert not audits.ask(proof(A, 3, C))
    assert audits.ask(proof(B))
    assert audits.convicted == {}


def test_neighbours_are_told_until_they_say_that_they_know():
    audits = Audits(b"secret", 2)
    audits.proves(proof(A))
    assert audits.convicted == {LIAR: 4}
    assert not audits.ask(proof(B)), "it is known"
    assert [peer for peer, _ in audits.to_tell((A, B, C))] == [B, C], "it came from a"
    assert audits.knows(B, LIAR, 5)
    assert not audits.knows(B, LIAR, 5), "no news"
    assert not audits.knows(B, C, 5), "who is c?"
    assert [peer for peer, _ in audits.to_tell((A, B, C))] == [C]
    audits.left(B)
    assert [peer for peer, _ in audits.to_tell((A, B, C))] == [B, C], "it may have forgotten all"


def test_what_counts_no_more_begins_where_the_earliest_proven_lie_can_still_be_undone_everywhere():
    audits = Audits(b"secret", 2)
    audits.proves(proof(A))
    assert audits.convicted == {LIAR: 4}, "round 3 was sealed when round 5 was applied"
    assert not audits.is_news(LIAR, 5)
    assert audits.is_news(LIAR, 4)
    earlier = AuditQuery((name(5), 0), 4, LIAR, B, 10.0)
    assert audits.ask(earlier)
    audits.end(earlier)
    audits.proves(earlier)
    assert audits.convicted == {LIAR: 3}
    assert not audits.knows(A, LIAR, 5), "it has the later proof alone"
    assert [(peer, told.round) for peer, told in audits.to_tell((A, B))] == [(A, 4)]


def test_the_newest_proofs_are_kept_and_all_liars_remembered():
    audits = Audits(b"secret", 2)
    for number in range(MAX_PROOFS):
        assert audits.proves(own(number, PeerId(f"liar {number}"))) == []
    assert audits.proves(own(99, LIAR)) == [(name(0), 0)]
    assert len(audits.convicted) == MAX_PROOFS + 1
    assert len(list(audits.to_tell((A,)))) == MAX_PROOFS


# -- what the rounds do about it --------------------------------------------------------------------------

RULES = Rounds(
    global_batch_tokens=100, contribution_timeout_seconds=1.0, finality_timeout_seconds=3.0, window=2
)
FALSE, TRUE = Reference(0, LIAR, name(7), 100), Reference(0, A, name(8), 100)


def tells(machine: GroupRounds, peer: PeerId, held: tuple[Reference, ...], settled: int) -> None:
    state = RoundSet()
    for reference in held:
        state.add(reference)
    entry = OpenSet(0, 2, 2, len(held), state.digest)
    machine.handle(ProgressArrived(peer, 3, 0, frozenset(), settled, True, -1, START, (entry,)), 1.0)


def machine_with(*held: Reference) -> GroupRounds:
    convicted: set[PeerId] = set()
    machine = GroupRounds(
        rules=RULES, me=PeerId("me"), settled=-1, now=0.0, draw=Draw(b"run", 4, 2, RULES.window),
        has_weight=lambda contributor, round: contributor not in convicted,
    )  # fmt: skip
    for peer in (A, B):
        machine.handle(NeighbourJoined(peer), 0.0)
    for reference in held:
        machine.handle(ContributionArrived(A, reference), 0.0)
    convicted.add(LIAR)
    return machine


def test_what_a_convicted_peer_made_leaves_the_open_rounds_though_half_holds_it_yet():
    machine = machine_with(FALSE, TRUE)
    for peer in (A, B):
        tells(machine, peer, (FALSE, TRUE), settled=-1)
    effects = machine.handle(Convicted(LIAR, 0), 1.1)
    assert RemoveContribution(0, LIAR) in effects
    assert machine.rounds[0].held == {A: TRUE}
    for peer in (A, B):
        effects = machine.handle(Announced(peer, (FALSE,)), 1.2)
        assert not [effect for effect in effects if isinstance(effect, RequestContributions)], (
            "nothing brings it back"
        )
    machine.handle(ContributionArrived(B, FALSE), 1.3)
    assert machine.rounds[0].held == {A: TRUE}


def test_a_round_before_those_of_the_proof_keeps_what_it_has():
    machine = machine_with(FALSE, TRUE)
    machine.handle(Convicted(LIAR, 1), 1.1)
    assert machine.rounds[0].held == {LIAR: FALSE, A: TRUE}


def test_what_half_of_the_group_has_settled_with_it_stands():
    late = machine_with(FALSE, TRUE)
    late.handle(Convicted(LIAR, 0), 0.5)
    for peer in (A, B):
        tells(late, peer, (FALSE, TRUE), settled=0)
    effects = late.handle(Announced(A, (FALSE, TRUE), (0,)), 1.2)
    assert RequestContributions(A, (FALSE.id,)) in effects, "the others did not know in time"
    late.handle(ContributionArrived(A, FALSE), 1.3)
    assert late.rounds.get(0, late.history.get(0)).held == {LIAR: FALSE, A: TRUE}


def test_who_did_not_answer_reduces_nothing_for_this_peer_for_as_long_as_one_is_drawn_for():
    machine = machine_with()
    reducing = machine.reducing
    reducing.members = frozenset((machine.me, A))
    for number in range(800):
        machine.chain.append(SettledSet(1, b"%12d" % number))
    round = next(number for number in range(400) if A in reducing.reducers(number))
    machine.handle(Unanswered(A, round), 1.0)
    assert A not in reducing.reducers(round)
    assert A not in reducing.reducers(round + reducing.draw.block_rounds - 1)
    assert any(A in reducing.reducers(number) for number in range(round + 4, 800))
    machine.handle(Unanswered(machine.me, round), 1.0)
    assert reducing.reducers(round) == (machine.me,) * 2
