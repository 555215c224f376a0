"""What becomes of a peer's own contributions where reducers add up their slices: shard by shard, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import RoundSet
from swarmnet.rounds.events import (
    FetchGroupState,
    Reference,
    RequestContributions,
    RequestIds,
    RestoreToMomentum,
)
from swarmnet.rounds.own_contributions import (
    ASK_SECONDS,
    AWAY_SECONDS,
    MAX_ASKS,
    MAX_TABLES,
    OwnContributions,
)
from swarmnet.rounds.result_table import Contributor, Draw, Table, tag_of
from swarmnet.run.schema import Rounds

RULES = Rounds(window=2)
DELAY = 4
SHARDS = 3
DRAW = Draw(b"run", 4, SHARDS, RULES.window)
ME, OTHER, X, Y = (PeerId(name) for name in ("me", "other", "x", "y"))
ALLIES = (PeerId("a"), PeerId("b"))
LATER = 50
"""A settled round after which everything here can be decided."""
INFINITE = float("inf")


def mine(round: int) -> ContributionId:
    return ContributionId(round.to_bytes(8, "big") + b"of mine!")


def result(round: int, contributor: PeerId, number: int = 0) -> Reference:
    return Reference(
        round, contributor, ContributionId(f"{contributor}{round:6}{number:6}".encode()[:16]), 100
    )


def holding(round: int, *shards: int, others: tuple[int, ...] = ()) -> Table:
    """My slices of `shards`, and somebody else's of those and of `others`."""
    own, else_ = Contributor.of(ME, mine(round), 10), Contributor.of(OTHER, ContributionId(b"o" * 16), 10)
    return Table({
        shard: frozenset((own, else_) if shard in shards else (else_,)) for shard in {*shards, *others}
    })  # fmt: skip


def offers_of(round: int, **results: Table) -> OwnContributions:
    """One contribution of mine, and the results that its round settled with, read."""
    offers = OwnContributions(RULES, DRAW)
    offers.made(round, mine(round), 0.0)
    settle(offers, round, **results)
    return offers


def settle(offers: OwnContributions, round: int, **results: Table) -> None:
    references = tuple(result(round, PeerId(contributor)) for contributor in sorted(results))
    offers.settled(round, references)
    for reference in references:
        offers.read(reference.id, results[reference.peer])


def test_of_a_contribution_that_is_in_all_shards_nothing_comes_back():
    offers = offers_of(3, x=holding(3, 0, 1), y=holding(3, 2))
    assert offers.decide(LATER, ALLIES, 0.0) == []
    assert list(offers.taken) == [mine(3)]
    assert offers.next_deadline() == INFINITE


def test_only_the_shards_that_it_is_not_in_come_back_and_once():
    offers = offers_of(3, x=holding(3, 1, others=(0, 2)))
    assert offers.decide(3 + DELAY - 1, ALLIES, 0.0) == [], "not before the delay"
    assert offers.decide(3 + DELAY, ALLIES, 0.0) == [RestoreToMomentum(3, mine(3), (0, 2))]
    assert offers.decide(LATER, ALLIES, 1.0) == []
    assert list(offers.taken) == [mine(3)], "one of its shards counts"
    assert offers.next_deadline() == INFINITE


@pytest.mark.parametrize("results", [{}, {"x": holding(3, others=(0, 1, 2))}], ids=["empty", "of others"])
def test_where_it_is_in_no_shard_all_of_it_comes_back(results):
    offers = offers_of(3, **results)
    assert offers.decide(LATER, ALLIES, 0.0) == [RestoreToMomentum(3, mine(3), (0, 1, 2))]
    assert not offers.open
    assert not offers.taken


def test_a_result_that_does_not_count_holds_nothing():
    first, second = sorted((X, Y), key=lambda contributor: DRAW.rank(3, 1, contributor))
    third = Contributor.of(PeerId("third"), ContributionId(b"t" * 16), 10)
    within = holding(3, 1)
    without = Table({1: holding(3, others=(1,)).shards[1] | {third}})
    assert offers_of(3, **{first: without, second: within}).decide(LATER, ALLIES, 0.0) == [
        RestoreToMomentum(3, mine(3), (0, 1, 2))
    ]
    assert offers_of(3, **{first: within, second: without}).decide(LATER, ALLIES, 0.0) == [
        RestoreToMomentum(3, mine(3), (0, 2))
    ]


def test_what_only_a_small_result_holds_comes_back():
    """Fewer than half of the round's largest: the peer has reduced for itself alone."""
    others = [Contributor.of(PeerId(f"p{n}"), ContributionId(bytes([n]) * 16), 10) for n in range(5)]
    alone = Table({0: frozenset((Contributor.of(ME, mine(3), 10),))})
    offers = offers_of(3, x=alone, y=Table({2: frozenset(others), 1: holding(3, 1).shards[1] | {*others}}))
    assert offers.decide(LATER, ALLIES, 0.0) == [RestoreToMomentum(3, mine(3), (0, 2))]


def unread(*contributors: PeerId) -> OwnContributions:
    """The set is known, and nothing of who is in the results of these."""
    offers = OwnContributions(RULES, DRAW)
    offers.made(3, mine(3), 0.0)
    offers.settled(3, tuple(result(3, contributor) for contributor in contributors))
    return offers


def test_results_that_were_not_read_are_asked_for_and_then_it_is_decided():
    offers = unread(X, Y)
    offers.read(result(3, X).id, holding(3, 0))
    (want,) = offers.decide(LATER, ALLIES, 0.0)
    assert want == RequestContributions(want.peer, (result(3, Y).id,)), "only those that are missing"
    assert offers.decide(LATER, ALLIES, ASK_SECONDS / 2) == []
    assert offers.next_deadline() == ASK_SECONDS
    (again,) = offers.decide(LATER, ALLIES, ASK_SECONDS)
    assert {want.peer, again.peer} == set(ALLIES), "allies in turn"
    assert offers.wants(result(3, Y).id)
    offers.read(result(3, Y).id, holding(3, 1))
    assert not offers.wants(result(3, Y).id)
    assert offers.decide(LATER, ALLIES, 1.5) == [RestoreToMomentum(3, mine(3), (2,))]
    assert offers.next_deadline() == INFINITE


def test_what_nobody_can_tell_is_asked_for_so_often_and_comes_back_then():
    offers = unread(X)
    effects = [e for second in range(MAX_ASKS + 5) for e in offers.decide(LATER, ALLIES, float(second))]
    assert [type(effect) for effect in effects] == [RequestContributions] * MAX_ASKS + [RestoreToMomentum]
    assert effects[-1] == RestoreToMomentum(3, mine(3), (0, 1, 2))
    assert offers.next_deadline() == INFINITE


def test_a_set_that_is_not_known_is_asked_for_before_its_results_are():
    offers = OwnContributions(RULES, DRAW)
    offers.made(3, mine(3), 0.0)
    (ask,) = offers.decide(LATER, ALLIES, 0.0)
    assert isinstance(ask, RequestIds)
    offers.accept_sets((3,), (result(3, X),))
    (want,) = offers.decide(LATER, ALLIES, 0.5)
    assert (type(want), want.ids) == (RequestContributions, (result(3, X).id,))
    offers.read(result(3, X).id, holding(3, 0, 1, 2))
    assert offers.decide(LATER, ALLIES, 1.0) == []
    assert list(offers.taken) == [mine(3)]


def test_nothing_comes_back_twice_when_a_history_is_given_up():
    """It counted in shard 1 there, and counts in shard 0, which came back already, in the one that stands."""
    offers = offers_of(3, x=holding(3, 1))
    assert offers.decide(LATER, ALLIES, 0.0) == [RestoreToMomentum(3, mine(3), (0, 2))]
    offers.undo(3)
    assert list(offers.open) == [mine(3)]
    settle(offers, 3, y=holding(3, 0))
    assert offers.decide(LATER, ALLIES, 1.0) == [RestoreToMomentum(3, mine(3), (1,))], (
        "0 and 2 are there since long"
    )
    offers.undo(3)
    settle(offers, 3)
    assert offers.decide(LATER, ALLIES, 2.0) == []
    assert not offers.taken, "all of it is with its maker"


SETS = st.lists(st.frozensets(st.integers(0, SHARDS - 1)), min_size=1, max_size=6)


@given(SETS)
def test_however_histories_change_each_shard_comes_back_at_most_once(histories):
    """`histories`: in which shards the contribution is, in one after the other."""
    offers = OwnContributions(RULES, DRAW)
    offers.made(3, mine(3), 0.0)
    back: list[int] = []
    for number, shards in enumerate(histories):
        offers.undo(3)
        offers.settled(3, (result(3, X, number),))
        offers.read(result(3, X, number).id, holding(3, *shards, others=(0, 1, 2)))
        for effect in offers.decide(LATER, ALLIES, float(number)):
            assert isinstance(effect, RestoreToMomentum)
            assert not set(effect.shards) & shards, "what counts in this history does not come back by it"
            back += effect.shards
    assert len(back) == len(set(back))
    assert set(range(SHARDS)) - histories[0] <= set(back)
    assert (mine(3) in offers.taken) == (len(back) < SHARDS)


def test_while_somebody_who_may_hold_it_is_away_nothing_comes_back():
    offers, away = offers_of(3, x=holding(3, 1)), PeerId("away")
    offers.agree(away, 2, 5.0)
    assert offers.decide(LATER, ALLIES, 30.0) == []
    assert offers.next_deadline() == 5.0 + AWAY_SECONDS
    assert offers.decide(LATER, ALLIES, 5.0 + AWAY_SECONDS) == [RestoreToMomentum(3, mine(3), (0, 2))]
    offers = offers_of(3, x=holding(3, 0, 1, 2))
    offers.agree(away, 2, 5.0)
    assert offers.decide(LATER, ALLIES, 30.0) == []
    assert list(offers.taken) == [mine(3)], "what is whole in its set waits for nobody"


def test_a_reducer_that_is_not_heard_may_hold_its_slices_though_it_was_away_before_they_were_made():
    """Seed 4820051: the line from the reducer was cut, the one to it was not."""
    offers = OwnContributions(RULES, DRAW)
    offers.agree(Y, 2, 10.0)
    offers.made(3, mine(3), 30.0, frozenset((X, Y)))
    settle(offers, 3, x=holding(3, 1, others=(0, 2)))
    assert offers.decide(LATER, ALLIES, 31.0) == []
    assert offers.next_deadline() == 30.0 + AWAY_SECONDS
    offers.agree(Y, 3, 40.0)
    back = offers.decide(LATER, (*ALLIES, Y), 40.0)
    assert back == [RestoreToMomentum(3, mine(3), (0, 2))], "it has settled the same set"


def test_a_reducer_that_is_never_heard_again_delays_what_comes_back_and_does_not_keep_it():
    offers = OwnContributions(RULES, DRAW)
    offers.made(3, mine(3), 30.0, frozenset((X, Y)))
    settle(offers, 3, x=holding(3, 1, others=(0, 2)))
    assert offers.decide(LATER, ALLIES, 30.0 + AWAY_SECONDS - 0.1) == []
    assert offers.decide(LATER, ALLIES, 30.0 + AWAY_SECONDS) == [RestoreToMomentum(3, mine(3), (0, 2))]


def test_only_results_of_rounds_with_an_open_contribution_are_wanted():
    offers = unread(X)
    offers.settled(4, (result(4, X),))
    assert offers.wants(result(3, X).id)
    assert not offers.wants(result(4, X).id), "none of mine is in that round"
    assert not offers.wants(result(3, Y).id), "not in the set"
    offers.decide(LATER, (), 0.0)
    offers.read(result(3, X).id, holding(3, 0, 1, 2))
    offers.decide(LATER, ALLIES, 1.0)
    assert not offers.wants(result(3, X).id)


def test_a_contribution_is_held_where_all_its_shards_are_in_an_open_rounds_results():
    offers, state = OwnContributions(RULES, DRAW), RoundSet()
    for contributor, table in ((X, holding(3, 0)), (Y, holding(3, 1, 2))):
        assert not offers.is_held(mine(3), state)
        state.add(result(3, contributor))
        assert not offers.is_held(mine(3), state), "in a result that nobody has read yet"
        offers.read(result(3, contributor).id, table)
    assert offers.is_held(mine(3), state)


def test_the_makers_of_a_set_are_those_whose_slices_are_in_what_was_read():
    offers = unread(X, Y)
    references = (result(3, X), result(3, Y))
    assert offers.contributors(references) == frozenset()
    offers.read(result(3, X).id, holding(3, 0))
    assert offers.contributors(references) == {tag_of(ME), tag_of(OTHER)}


def test_only_so_many_tables_are_remembered():
    offers = OwnContributions(RULES, DRAW)
    for round in range(MAX_TABLES + 5):
        offers.read(result(round, X).id, holding(round, 0))
    assert offers.contributors([result(4, X)]) == frozenset()
    assert offers.contributors([result(5, X)])
    assert len(offers._tables) == MAX_TABLES


def test_without_allies_nobody_is_asked_and_the_question_waits_without_spinning():
    offers = unread(X)
    for second in range(3 * MAX_ASKS):
        assert offers.decide(LATER, (), float(second)) == []
        assert offers.next_deadline() == second + ASK_SECONDS
    assert offers.decide(LATER, ALLIES, 100.0), "now there is somebody"


def test_once_a_result_was_read_it_is_asked_for_no_more_though_somebody_is_away():
    offers = unread(X)
    offers.agree(PeerId("away"), 2, 0.5)
    assert isinstance(offers.decide(LATER, ALLIES, 0.0)[0], RequestContributions)
    offers.read(result(3, X).id, holding(3, 1))
    assert offers.decide(LATER, ALLIES, 5.0) == []
    assert offers.next_deadline() == 0.5 + AWAY_SECONDS, "a timer that finds nothing due would spin"


STEPS = st.lists(
    st.one_of(
        *(
            st.tuples(st.just(what), st.integers(0, 2))
            for what in ("made", "settled", "read", "undo", "jumped", "agree")
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 5.0, 100.0])),
    ),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_a_timer_never_stays_in_the_past_whatever_happened(steps, has_allies):
    """After every decision the next one is later: a peer whose timer finds nothing to do would spin."""
    offers, now, same_branch_peers = OwnContributions(RULES, DRAW), 0.0, ALLIES if has_allies else ()
    made: set[int] = set()
    for what, number in steps:
        match what:
            case "made" if number not in made:
                made.add(number)
                offers.made(number, mine(number), now)
            case "settled":
                offers.settled(number, (result(number, X),))
            case "read":
                offers.read(result(number, X).id, holding(number, number % SHARDS))
            case "undo":
                offers.give_up(FetchGroupState((X,), "forked", number), same_branch_peers)
            case "jumped":
                offers.jumped(number)
            case "agree":
                offers.agree(PeerId(f"away {number}"), number, now)
            case "wait":
                now += number
        offers.decide(12, same_branch_peers, now)
        assert offers.next_deadline() > now
    for _ in range(100 * MAX_ASKS):
        now = offers.next_deadline()
        if now == INFINITE:
            return
        offers.decide(12, same_branch_peers, now)
        assert offers.next_deadline() > now
    assert not has_allies, "with somebody to ask all is decided in the end"
