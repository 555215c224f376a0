"""What becomes of a peer's own contributions: settled, or given back once."""

from __future__ import annotations

import pytest

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.events import (
    FetchGroupState,
    OpenSet,
    ProgressArrived,
    Reference,
    RequestIds,
    RestoreToMomentum,
)
from swarmnet.rounds.fork_choice import ForkChoice
from swarmnet.rounds.history import START, Chain, SettledSet
from swarmnet.rounds.own_contributions import (
    ASK_SECONDS,
    AWAY_SECONDS,
    HEARD_SECONDS,
    LEARN_ASKS,
    LEARNED_ROUNDS,
    LONGEST_WAIT_SECONDS,
    MAX_ASKS,
    OwnContributions,
)
from swarmnet.run.schema import Rounds

RULES = Rounds(window=2)
DELAY = 4
ALLIES = (PeerId("a"), PeerId("b"))
LONG_AGO = -99.0
"""Before any contribution was made: who was an ally then and is none now holds none of them."""


def mine(number: int) -> ContributionId:
    return ContributionId(number.to_bytes(16, "big"))


def reference(round: int, number: int) -> Reference:
    return Reference(round, PeerId("me"), mine(number), 100)


def test_it_is_decided_only_some_rounds_later_whether_a_contribution_is_in_its_set():
    offers = OwnContributions(RULES)
    offers.made(3, mine(3), 0.0)
    offers.made(4, mine(4), 0.0)
    offers.settled(3, (reference(3, 3),))
    offers.settled(4, ())
    assert offers.decide(3 + DELAY - 1, ALLIES, 0.0) == []
    assert offers.decide(4 + DELAY, ALLIES, 0.0) == [RestoreToMomentum(4, mine(4))]
    assert offers.decide(100, ALLIES, 0.0) == [], "once"
    assert not offers.open


def test_a_history_that_is_given_up_opens_the_question_again():
    offers = OwnContributions(RULES)
    for round in (3, 4):
        offers.made(round, mine(round), 0.0)
        offers.settled(round, (reference(round, round),))
    assert offers.decide(20, ALLIES, 0.0) == []
    offers.undo(4)
    offers.settled(4, ())
    assert offers.decide(20, ALLIES, 1.0) == [RestoreToMomentum(4, mine(4))]


def rejected(made_at: float = 0.0) -> OwnContributions:
    """One contribution, which is not in the set of its round."""
    offers = OwnContributions(RULES)
    offers.made(3, mine(3), made_at)
    offers.settled(3, ())
    return offers


def test_nothing_is_given_back_while_an_ally_that_may_hold_it_is_away():
    offers, away = rejected(), PeerId("away")
    offers.agree(away, 2, 5.0)
    assert offers.decide(50, ALLIES, 30.0) == []
    assert offers.next_deadline() == 5.0 + AWAY_SECONDS
    assert offers.decide(50, (*ALLIES, away), 31.0) == [], "it is back, and has not settled that round yet"
    offers.agree(away, 3, 32.0)
    assert offers.decide(50, (*ALLIES, away), 32.0) == [RestoreToMomentum(3, mine(3))], "it has, and lacks it"
    offers = rejected()
    offers.agree(away, 2, 5.0)
    assert offers.decide(50, ALLIES, 5.0 + AWAY_SECONDS) == [RestoreToMomentum(3, mine(3))], "long enough"
    assert offers.next_deadline() == float("inf")


def test_who_comes_back_after_all_others_were_asked_is_asked_what_it_remembers():
    offers, back = OwnContributions(RULES), PeerId("back")
    offers.made(3, mine(3), 0.0)
    offers.agree(back, 2, 1.0)
    clock = 1.0
    while any(offers.decide(50, ALLIES, clock)):
        clock += ASK_SECONDS
    offers.agree(back, 49, clock + 0.1)
    assert offers.decide(50, (*ALLIES, back), clock + 0.1) == [], "nothing is given back before it was asked"
    clock += ASK_SECONDS
    assert offers.decide(50, (*ALLIES, back), clock) == [RequestIds(back, (3,))]
    offers.accept_sets((3,), (reference(3, 3),))
    assert offers.decide(50, (*ALLIES, back), clock) == []
    assert list(offers.taken) == [mine(3)]


def test_the_history_of_one_that_was_away_may_stand_and_hold_it():
    offers, away = rejected(), PeerId("away")
    offers.agree(away, 2, 5.0)
    assert offers.decide(50, ALLIES, 30.0) == []
    offers.give_up(FetchGroupState((away,), "forked", 3), ALLIES)
    offers.settled(3, (reference(3, 3),))
    assert offers.decide(50, ALLIES, 5.0 + AWAY_SECONDS) == []
    assert list(offers.taken) == [mine(3)]


def test_who_was_gone_before_or_is_only_no_neighbour_any_more_is_not_waited_for():
    offers = rejected(made_at=20.0)
    offers.agree(PeerId("gone before"), 2, 20.0 - HEARD_SECONDS - 0.1)
    offers.agree(PeerId("released"), 2, 25.0)
    offers.released(PeerId("released"))
    assert offers.decide(50, ALLIES, 30.0) == [RestoreToMomentum(3, mine(3))]


def test_those_who_come_and_go_hold_it_up_only_so_long():
    offers = rejected()
    for second in range(0, int(LONGEST_WAIT_SECONDS), 10):
        offers.agree(PeerId(f"passer-by {second}"), 2, float(second))
        assert offers.decide(50, ALLIES, float(second)) == []
    assert offers.next_deadline() == LONGEST_WAIT_SECONDS
    assert offers.decide(50, ALLIES, LONGEST_WAIT_SECONDS) == [RestoreToMomentum(3, mine(3))]


def test_sets_that_a_snapshot_jumped_over_are_asked_for_once_a_second_and_allies_in_turn():
    offers = OwnContributions(RULES)
    offers.made(3, mine(3), 0.0)
    (first,) = offers.decide(50, ALLIES, 0.0)
    assert offers.decide(50, ALLIES, ASK_SECONDS / 2) == []
    assert offers.next_deadline() == ASK_SECONDS
    (second,) = offers.decide(50, ALLIES, ASK_SECONDS)
    assert {first, second} == {RequestIds(branch_peer, (3,)) for branch_peer in ALLIES}
    offers.accept_sets((3,), (reference(3, 3), reference(4, 9)))
    assert offers.decide(50, ALLIES, 1.5) == []
    assert not offers.open
    assert offers.answer((3,), {}, 50) == ((reference(3, 3),), (3,))


def test_what_nobody_remembers_is_given_back():
    offers = OwnContributions(RULES)
    offers.made(3, mine(3), 0.0)
    effects = [e for second in range(MAX_ASKS + 2) for e in offers.decide(50, ALLIES, float(second))]
    assert sum(isinstance(effect, RequestIds) for effect in effects) == MAX_ASKS
    assert effects[-1] == RestoreToMomentum(3, mine(3))


def test_without_allies_nobody_is_asked_and_the_question_waits_without_spinning():
    offers = OwnContributions(RULES)
    offers.made(3, mine(3), 0.0)
    for second in range(3 * MAX_ASKS):
        assert offers.decide(50, (), float(second)) == []
        assert offers.next_deadline() == second + ASK_SECONDS
    assert offers.decide(50, ALLIES, 100.0), "now there is somebody"


def test_nobody_can_tell_a_set_that_was_not_asked_for():
    offers = OwnContributions(RULES)
    offers.made(3, mine(3), 0.0)
    offers.accept_sets((3,), ())
    assert offers.answer((3,), {}, 50) == ((), ())


def settled_ones(offers: OwnContributions) -> OwnContributions:
    for round in range(10):
        offers.made(round, mine(round), 0.0)
        offers.settled(round, (reference(round, round),))
    assert offers.decide(50, ALLIES, 0.0) == []
    return offers


def test_only_what_was_made_since_the_histories_parted_is_open_again():
    offers = settled_ones(OwnContributions(RULES))
    offers.give_up(FetchGroupState((), "forked", 6), ALLIES)
    assert list(offers.open.values()) == [6, 7, 8, 9]


def test_where_nobody_knows_the_fork_what_was_last_agreed_upon_decides():
    side, stranger = PeerId("other side"), PeerId("newcomer")
    offers = settled_ones(OwnContributions(RULES))
    offers.agree(ALLIES[0], 9, LONG_AGO)
    offers.agree(side, 4, LONG_AGO)
    offers.give_up(FetchGroupState((stranger,), "forked", 8, exact=False), ALLIES)
    assert sorted(offers.open.values()) == list(range(10)), "what was agreed upon is doubted"
    effects = [e for second in range(99) for e in offers.decide(50, ALLIES, float(second))]
    gone = [effect for effect in effects if isinstance(effect, RestoreToMomentum)]
    assert [effect.round for effect in gone] == [5, 6, 7, 8, 9]
    assert sorted(offers.taken.values()) == [0, 1, 2, 3, 4], "what nobody remembers stays as it was"
    offers = settled_ones(OwnContributions(RULES))
    offers.agree(side, 7, LONG_AGO)
    offers.give_up(FetchGroupState((side, stranger), "far behind"), ALLIES)
    (ask,) = offers.decide(50, ALLIES, 0.0)
    assert ask.rounds == tuple(range(10)), "in one message"
    offers.accept_sets(range(10), [reference(3, 3), reference(9, 9)])
    gone = offers.decide(50, ALLIES, 0.5)
    assert sorted(effect.round for effect in gone) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_what_was_agreed_upon_but_not_decided_yet_stays_settled_if_nobody_remembers():
    offers = OwnContributions(RULES)
    for round in (8, 9):
        offers.made(round, mine(round), 0.0)
        offers.settled(round, (reference(round, round),))
    assert offers.decide(9, ALLIES, 0.0) == [], "too early to decide"
    offers.agree(PeerId("gone"), 8, LONG_AGO)
    offers.give_up(FetchGroupState((PeerId("newcomer"),), "far behind"), ())
    effects = [e for second in range(99) for e in offers.decide(50, ALLIES, float(second))]
    assert [effect.round for effect in effects if isinstance(effect, RestoreToMomentum)] == [9]
    assert list(offers.taken.values()) == [8]


def test_what_was_agreed_upon_with_an_ally_that_has_just_gone_over_is_not_agreed_upon():
    offers, branch_peer, ahead = OwnContributions(RULES), PeerId("gone over"), PeerId("far ahead")
    offers.made(8, mine(8), 0.0)
    offers.settled(8, (reference(8, 8),))
    assert offers.decide(9, ALLIES, 0.0) == [], "too early to decide"
    offers.agree(branch_peer, 8, LONG_AGO)
    offers.give_up(FetchGroupState((branch_peer, ahead), "far behind"), (branch_peer,))
    effects = [e for second in range(99) for e in offers.decide(50, ALLIES, float(second))]
    assert [effect.round for effect in effects if isinstance(effect, RestoreToMomentum)] == [8]


def test_a_newcomer_learns_the_sets_before_its_snapshot_and_can_tell_them():
    offers = OwnContributions(RULES)
    offers.jumped(99)
    (ask,) = offers.decide(99, ALLIES, 0.0)
    assert ask.rounds == tuple(range(100 - LEARNED_ROUNDS, 100))
    offers.accept_sets((98, 99), (reference(98, 98),))
    assert offers.answer((97, 98, 99), {}, 99) == ((reference(98, 98),), (98, 99))
    (ask,) = offers.decide(99, ALLIES, offers.next_deadline())
    assert ask.rounds == tuple(range(100 - LEARNED_ROUNDS, 98)), "what is known by now is not asked for"


def test_the_sets_on_its_disk_are_known_to_a_peer_that_starts_again_and_it_can_tell_them():
    before = OwnContributions(RULES)
    for round in range(LEARNED_ROUNDS + 10):
        before.settled(round, (reference(round, round),) if round % 2 else ())
    newest = LEARNED_ROUNDS + 7
    kept = before.known(newest)
    assert list(kept) == list(range(newest + 1 - LEARNED_ROUNDS, newest + 1))
    offers = OwnContributions(RULES)
    offers.restored(kept)
    offers.jumped(newest)
    assert offers.decide(newest, ALLIES, 0.0) == [], "nothing is left to learn"
    asked = (newest - 2, newest - 1, newest + 1)
    assert offers.answer(asked, {}, newest) == ((reference(newest - 2, newest - 2),), asked[:2])


def test_what_no_ally_can_tell_a_newcomer_is_asked_for_only_so_often():
    offers = OwnContributions(RULES)
    offers.jumped(5)
    asks = [ask for second in range(99) for ask in offers.decide(5, ALLIES, float(second))]
    assert len(asks) == LEARN_ASKS
    assert offers.next_deadline() == float("inf")
    offers.jumped(-1)
    assert offers.decide(5, ALLIES, 100.0) == [], "who starts from the seed lacks nothing"


def test_a_contribution_whose_round_is_not_old_enough_sets_no_timer_though_its_set_was_asked_for():
    offers = OwnContributions(RULES)
    offers.jumped(3)
    offers.made(3, mine(3), 0.0)
    now = 0.0
    for _ in range(LEARN_ASKS):
        assert offers.decide(3, ALLIES, now)
        now = offers.next_deadline()
    assert offers.decide(3, ALLIES, now) == []
    assert offers.next_deadline() == float("inf"), "a timer that finds nothing due would spin"


def test_who_was_to_follow_others_and_fetched_its_own_history_gives_up_only_what_came_after():
    chain = Chain()
    offers = OwnContributions(RULES)
    for round in range(6):
        offers.made(round, mine(round), 0.0)
        offers.settled(round, (reference(round, round),))
        chain.append(SettledSet(1, bytes([round] * 8)))
    assert offers.decide(5 + DELAY, ALLIES, 0.0) == []
    assert len(offers.taken) == 6
    own = ForkChoice(rules=RULES, chain=chain, neighbours={}, now=0.0)
    resync_request = FetchGroupState((PeerId("a"),), "their history stands", fork_round=2)
    value = chain.at(4)
    assert value is not None
    offers.replaced(resync_request, own, 4, value)
    assert set(offers.open.values()) == {5}
    assert set(offers.taken.values()) == {0, 1, 2, 3, 4}
    assert offers.answer((3,), {}, 4)[1] == (3,), "and tells others the sets"
    offers.replaced(resync_request, own, 4, b"another!")
    assert set(offers.open.values()) == {2, 3, 4, 5}


def test_a_history_that_this_peer_left_and_another_took_up_counts_where_it_comes_back_to_it():
    chain, theirs = Chain(), Chain()
    offers = OwnContributions(RULES)
    for round in range(6):
        offers.made(round, mine(round), 0.0)
        offers.settled(round, (reference(round, round),))
        chain.append(SettledSet(1, bytes([round] * 8)))
        if round < 4:
            theirs.append(SettledSet(1, bytes([round] * 8)))
    assert offers.decide(5 + DELAY, ALLIES, 0.0) == []
    left = FetchGroupState((PeerId("a"),), "their history stands", fork_round=4)
    before, after = chain.at(3), chain.at(5)
    assert before is not None
    assert after is not None
    offers.replaced(left, ForkChoice(rules=RULES, chain=chain, neighbours={}, now=0.0), 3, before)
    assert set(offers.open.values()) == {4, 5}
    behind = FetchGroupState((PeerId("b"),), "others are ahead")
    offers.replaced(behind, ForkChoice(rules=RULES, chain=theirs, neighbours={}, now=0.0), 5, after)
    offers.jumped(5)
    assert offers.decide(5 + DELAY, (), LONGEST_WAIT_SECONDS + 1) == []
    assert set(offers.taken.values()) == set(range(6)), "nobody but this peer knows the sets of 4 and 5"


@pytest.mark.parametrize("neighbour_is_known", [True, False])
def test_a_state_of_a_third_branch_gives_up_what_came_after_that_branch_forked(neighbour_is_known):
    chain, theirs = Chain(), Chain()
    offers = OwnContributions(RULES)
    for round in range(6):
        offers.made(round, mine(round), 0.0)
        offers.settled(round, (reference(round, round),))
        chain.append(SettledSet(1, bytes([round] * 8)))
        theirs.append(SettledSet(1, bytes([round if round < 2 else 9] * 8)))
    assert offers.decide(5 + DELAY, ALLIES, 0.0) == []
    own = ForkChoice(
        rules=RULES, chain=chain, neighbours={PeerId("c"): NeighbourView(linked_at=0.0)}, now=0.0
    )
    if neighbour_is_known:
        sets = tuple(OpenSet(n, 0, 0, 1, theirs.part(n, n)[0].digest) for n in range(6))
        own.progress(ProgressArrived(PeerId("c"), 6, 0, frozenset(), 5, True, -1, START, sets), 0.0)
    asked = FetchGroupState((PeerId("a"),), "their branch stands", fork_round=4)
    offers.replaced(asked, own, 5, theirs.value)
    given_up = {2, 3, 4, 5} if neighbour_is_known else {4, 5}
    assert set(offers.open.values()) == given_up, "the state that was fetched has no set of rounds 2 and 3"
