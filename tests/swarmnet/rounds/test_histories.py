"""Which neighbours are on which history, by what they tell of their chains."""

from __future__ import annotations

from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.events import AskChain, Effect, OpenSet, ProgressArrived, Resynchronise
from swarmnet.rounds.fork_choice import LISTEN_SECONDS, Histories
from swarmnet.rounds.history import Chain, SettledSet
from swarmnet.run.manifest import Rounds

OLD, NEW, THIRD = PeerId("old"), PeerId("new"), PeerId("third")
RULES = Rounds(window=2, snapshot_rounds=4)


def settled(branch: str, round: int) -> SettledSet:
    return SettledSet(1, f"{branch}{round:07}"[-8:].encode())


def chain(branch: str, last: int, fork: int) -> Chain:
    """All branches are the same up to the round before `fork`."""
    found = Chain()
    for round in range(last + 1):
        found.append(settled("x" if round < fork else branch, round))
    return found


def restarted(earlier: Chain, at: int) -> Chain:
    """What a peer that has started again from its disk knows of the history that it had."""
    value = earlier.at(at)
    assert value is not None
    return Chain(at, value, earlier.earlier(at))


def told(peer: PeerId, their: Chain, anchor: int) -> ProgressArrived:
    value = their.at(anchor)
    assert value is not None
    sets = tuple(
        OpenSet(round, 1, 1, entry.count, entry.digest)
        for round, entry in enumerate(their.part(anchor + 1, their.round), start=anchor + 1)
    )
    return ProgressArrived(peer, their.round + 1, 0, frozenset(), their.round, True, anchor, value, sets)


def of(mine: Chain, *peers: PeerId) -> Histories:
    return Histories(RULES, mine, {peer: NeighbourView() for peer in peers}, 0.0)


def wishes(effects: list[Effect]) -> list[Resynchronise]:
    return [effect for effect in effects if isinstance(effect, Resynchronise)]


def test_peers_of_one_history_stand_together_though_one_does_not_know_where_it_began():
    mine, theirs = chain("m", 28, 20), chain("t", 30, 20)
    histories = of(mine, OLD, NEW)
    assert not wishes(histories.progress(told(OLD, theirs, 19), 9.0)), "one against one, and mine is smaller"
    (ask,) = histories.progress(told(NEW, theirs, 26), 9.0)
    assert ask == AskChain(NEW, 28)
    answer = histories.chain_arrived(NEW, 26, theirs.at(25) or b"", tuple(theirs.part(26, 28)), 9.0)
    (wish,) = wishes(answer)
    assert set(wish.peers) == {OLD, NEW}
    assert (wish.fork_round, wish.exact) == (20, True), "the one that knows tells it"


def test_a_neighbour_that_took_up_another_history_is_asked_again_where_it_parts():
    mine, first, second = chain("m", 28, 22), chain("t", 25, 18), chain("u", 30, 22)
    histories = of(mine, OLD, NEW, THIRD)
    for peer in (NEW, THIRD):
        histories.progress(told(peer, mine, 20), 9.0)
    histories.progress(told(OLD, first, 17), 9.0)
    fork = histories.neighbours[OLD].fork
    assert fork is not None
    assert fork.round == 18
    assert histories.progress(told(OLD, second, 24), 9.1) == [AskChain(OLD, 28)]
    histories.chain_arrived(OLD, 20, second.at(19) or b"", tuple(second.part(20, 28)), 9.2)
    fork = histories.neighbours[OLD].fork
    assert fork is not None
    assert fork.round == 22
    histories.progress(told(OLD, chain("u", 31, 22), 29), 9.3)
    assert histories.neighbours[OLD].fork == fork, "it goes on on the same one"


def test_who_took_up_the_others_history_out_of_our_reach_stands_with_them():
    mine, theirs, parted = chain("m", 28, 22), chain("u", 40, 22), chain("z", 25, 18)
    histories = of(mine, THIRD, OLD, NEW)
    told_before = [told(THIRD, parted, 17), told(OLD, chain("u", 30, 22), 20), told(NEW, theirs, 20)]
    for progress in told_before:
        assert not wishes(histories.progress(progress, 9.0)), "two of four are no majority"
    assert not wishes(histories.progress(told(THIRD, theirs, 35), 9.1)), "it may not know yet where we are"
    (wish,) = wishes(histories.progress(told(NEW, theirs, 27), 9.2))
    assert {THIRD, NEW} <= set(wish.peers)
    assert (wish.fork_round, wish.exact) == (22, True)


def test_who_has_not_come_as_far_as_the_fork_supports_neither_side():
    left, right, newcomer = chain("m", 28, 20), chain("t", 28, 20), chain("x", 15, 20)
    resolved = []
    for mine, theirs in ((left, right), (right, left)):
        histories = of(mine, OLD, NEW)
        histories.progress(told(NEW, newcomer, 10), 9.0)
        assert not wishes(histories.progress(told(OLD, theirs, 19), 9.0)), "it may come to one of them yet"
        resolved += wishes(histories.progress(told(OLD, theirs, 19), 9.0 + LISTEN_SECONDS))
    (wish,) = resolved
    assert wish.fork_round == 20


def test_two_sides_that_have_just_parted_do_not_both_give_up():
    left, right = chain("m", 20, 20), chain("t", 20, 20)
    one, two, three = (PeerId(f"left {number}") for number in range(3))
    # Of its own side each has not heard yet that it has come as far as the fork.
    of_left, of_right = of(left, two, three, OLD, NEW), of(right, NEW, one, two, three)
    behind = chain("x", 19, 20)
    for peer in (two, three):
        of_left.progress(told(peer, behind, 15), 9.0)
    of_right.progress(told(NEW, behind, 15), 9.0)
    for peer in (OLD, NEW):
        assert not wishes(of_left.progress(told(peer, right, 15), 9.1)), "two of five are no majority"
    gave_up = [bool(wishes(of_right.progress(told(peer, left, 15), 9.1))) for peer in (one, two, three)]
    assert gave_up == [False, False, True], "three of five are one"
    for peer in (two, three):
        of_left.progress(told(peer, left, 15), 9.2)
    assert not wishes(of_left.progress(told(OLD, right, 15), 9.9))


def test_who_may_still_take_up_either_history_does_not_go_on_with_the_sets_of_both():
    mine, left, right = chain("x", 19, 20), chain("m", 25, 20), chain("t", 25, 20)
    histories = of(mine, OLD, NEW)
    for peer, theirs in ((OLD, left), (NEW, right)):
        histories.progress(told(peer, theirs, 17), 9.0)
    assert set(histories.allies) == {OLD, NEW}, "up to here they are one"
    histories.settle(settled("m", 20))
    assert set(histories.allies) == {OLD}
    fork = histories.neighbours[NEW].fork
    assert fork is not None
    assert (fork.round, fork.exact) == (20, True)


def test_where_an_ally_that_took_up_another_history_parted_is_asked_not_guessed():
    """It was far ahead of us with it when it told so: the first set of it that we can compare is not where
    the histories part, and what was made between is given back only if that is known."""
    histories = of(chain("m", 11, 9), OLD)
    histories.progress(told(OLD, chain("m", 11, 9), 7), 9.0)
    assert set(histories.allies) == {OLD}
    theirs = chain("t", 17, 9)
    assert not wishes(histories.progress(told(OLD, theirs, 15), 9.0)), "too far ahead to compare"
    for round in range(12, 17):
        histories.settle(settled("m", round))
    assert not histories.allies
    fork = histories.neighbours[OLD].fork
    assert fork is None
    (ask,) = histories.progress(told(OLD, theirs, 15), 9.0)
    assert ask == AskChain(OLD, 16)


def test_who_started_again_sees_at_once_that_the_others_began_farther_back():
    mine = restarted(chain("m", 15, 8), 15)
    mine.append(settled("m", 16))
    theirs = chain("t", 8, 8)
    histories = of(mine, OLD, NEW)
    assert not wishes(histories.progress(told(OLD, theirs, 7), 9.0)), "one of three: it stays where it is"
    (wish,) = wishes(histories.progress(told(NEW, theirs, 7), 9.0))
    assert set(wish.peers) == {OLD, NEW}
    assert (wish.fork_round, wish.exact) == (8, True)


def test_of_two_halves_the_one_that_started_farther_back_comes_to_the_other():
    mine, theirs = restarted(chain("m", 15, 8), 15), chain("t", 9, 8)
    here, there = of(mine, OLD), of(theirs, NEW)
    assert not any(wishes(here.progress(told(OLD, theirs, 7), at)) for at in (9.0, 99.0))
    assert not wishes(there.progress(told(NEW, mine, 15), 9.0)), "it may only not know where we are"
    assert wishes(there.progress(told(NEW, mine, 15), 99.0))


def test_nobody_is_an_ally_by_what_is_only_remembered():
    mine, theirs = restarted(chain("m", 15, 16), 15), chain("m", 7, 16)
    histories = of(mine, OLD)
    assert histories.progress(told(OLD, theirs, 5), 9.0) == []
    assert not histories.allies, "the sets after the seventh round are not here: it would wait for them"
    assert histories.anchor()[0] == 15
    histories.progress(told(OLD, chain("m", 15, 16), 10), 9.0)
    assert set(histories.allies) == {OLD}


def test_newcomers_without_weights_do_not_hold_up_who_is_out_of_reach():
    group, newcomers = (OLD, NEW, THIRD), [PeerId(f"newcomer {number}") for number in range(4)]
    histories = of(chain("m", 3, 9), *group)
    for peer in newcomers:
        histories.neighbours[peer] = NeighbourView(linked_at=9.0)
    far = chain("m", 60, 90)
    assert not any(wishes(histories.progress(told(peer, far, 50), 9.0)) for peer in group), "not heard yet"
    (wish,) = wishes(histories.progress(told(OLD, far, 50), 9.0 + LISTEN_SECONDS))
    assert set(wish.peers) == set(group)
