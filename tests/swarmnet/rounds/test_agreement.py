"""When a round settles against what allies say of it."""

from __future__ import annotations

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import NeighbourView, RoundSet
from swarmnet.rounds.events import OpenSet, ProcessSuspended, Reference, TimePassed
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.settlement import FinalityRules
from swarmnet.run.schema import Rounds

RULES = Rounds(finality_timeout_seconds=3.0)


def branch_peer(in_step: bool, digest: bytes | None) -> NeighbourView:
    sets = {} if digest is None else {5: OpenSet(5, 1, 1, 0, digest)}
    return NeighbourView(round=9, in_step=in_step, sets=sets, relation="same")


def settles(now: float, *same_branch_peers: NeighbourView) -> bool:
    state = RoundSet(closed_at=0.0)
    state.seal(1.0)
    agreement = FinalityRules(
        RULES, {PeerId(f"p{number}"): view for number, view in enumerate(same_branch_peers)}
    )
    state.sealed = agreement.sealed(5, state)
    return agreement.may_settle(5, state, now)


def test_a_round_settles_when_all_who_are_in_step_have_sealed_the_same_set():
    same = RoundSet().digest
    assert settles(1.5, branch_peer(True, same), branch_peer(True, same))
    assert not settles(1.5, branch_peer(True, same), branch_peer(True, b"another"))
    assert not settles(1.5, branch_peer(True, same), branch_peer(True, None))


def test_one_who_catches_up_is_not_waited_for_but_half_of_the_group_is_for_a_while():
    same = RoundSet().digest
    assert settles(1.5, branch_peer(True, same), branch_peer(True, same), branch_peer(False, None))
    assert not settles(1.5, branch_peer(True, same), branch_peer(False, None), branch_peer(False, None))
    assert settles(4.1, branch_peer(True, same), branch_peer(False, None), branch_peer(False, None))


def told(sealed: int = 0, gathered: int = 0, digest: bytes | None = None, settled: int = -1) -> NeighbourView:
    sets = {5: OpenSet(5, gathered, sealed, 0, RoundSet().digest if digest is None else digest)}
    return NeighbourView(round=9, in_step=True, sets=sets, relation="same", settled=settled)


def levels(hops: int, *same_branch_peers: NeighbourView) -> tuple[int, int]:
    """(gathered, sealed) of a peer that has sealed round 5."""
    state = RoundSet(closed_at=0.0)
    state.seal(1.0)
    views = {PeerId(f"p{number}"): view for number, view in enumerate(same_branch_peers)}
    agreement = FinalityRules(RULES, views, hops)
    agreement.raise_levels(5, state, departed=False)
    return state.gathered, state.sealed


def test_a_level_is_one_more_than_the_least_that_neighbours_tell_and_ends_beyond_the_farthest_peer():
    assert levels(4, told(2, 2), told(3, 3)) == (3, 3)
    assert levels(4, told(9, 9), told(9, 9)) == (5, 5)
    assert levels(4, told(0, 0), told(3, 3)) == (2, 1), "who told nothing of its own makes none: it went on"


def test_another_set_is_no_agreement_however_high_its_level():
    assert levels(4, told(5, 5, b"another"), told(5, 5)) == (5, 1)


def test_who_has_settled_a_round_holds_up_no_level_of_what_is_gathered():
    assert levels(4, told(0, 0, settled=5), told(3, 3))[0] == 4


def test_a_set_that_changes_is_sealed_by_this_peer_alone_again():
    state = RoundSet(closed_at=0.0)
    state.seal(1.0)
    state.sealed = state.gathered = 4
    state.add(Reference(5, PeerId("maker"), ContributionId(b"i" * 16), 10))
    assert (state.gathered, state.sealed) == (4, 1)


def test_a_lost_ally_holds_up_the_agreement_but_not_what_is_gathered():
    state = RoundSet(closed_at=0.0)
    state.seal(1.0)
    agreement = FinalityRules(RULES, {PeerId("p"): told(1, 1)}, 1)
    assert agreement.raise_levels(5, state, departed=True)
    assert (state.gathered, state.sealed) == (2, 1)
    assert agreement.raise_levels(5, state, departed=False)
    assert (state.gathered, state.sealed) == (2, 2)
    assert not agreement.raise_levels(5, state, departed=False), "nothing more to reach"


OTHER = b"another set!"


def standing(now: float, *same_branch_peers: NeighbourView) -> bytes | None:
    """What a peer that has sealed round 5 at 1.0 takes up of it, holding nothing itself."""
    state = RoundSet(closed_at=0.0)
    state.seal(1.0)
    agreement = FinalityRules(
        RULES, {PeerId(f"p{number}"): view for number, view in enumerate(same_branch_peers)}
    )
    return agreement.adopted_digest(5, state, now)


def test_one_ally_does_not_decide_what_the_others_settle():
    liar, honest = told(settled=5, digest=OTHER), told(1, 1)
    for now in (1.5, 3.9, 4.5, 99.0):
        assert standing(now, liar, honest, honest, honest) is None
    assert settles(4.5, liar, honest, honest), "patience is over: it settles what it has itself"
    naming_ours = told(settled=5)
    assert standing(1.5, naming_ours, honest, honest, honest) is None, "nor when"


def test_what_half_of_those_in_sight_have_settled_is_taken_up_at_once():
    ahead = told(settled=5, digest=OTHER)
    assert standing(1.5, ahead, ahead, told()) == OTHER
    assert standing(1.5, ahead) == OTHER, "of two each is half"


def test_of_several_sets_that_were_settled_the_one_counts_that_most_name():
    ours = RoundSet().digest
    assert standing(1.5, told(settled=5, digest=OTHER), told(settled=5), told(settled=5)) == ours
    assert standing(1.5, told(settled=5, digest=OTHER), told(settled=5)) == ours, "of equally many the own"


def test_a_few_who_settled_are_joined_when_patience_is_over_where_no_more_hold_another_set():
    ahead = told(settled=5, digest=OTHER)
    third, fourth = told(digest=b"a third one."), told(digest=b"a fourth one")
    assert standing(3.9, ahead, third, fourth) is None
    assert standing(4.1, ahead, third, fourth) == OTHER
    assert standing(7.1, ahead, third, fourth) is None, "its contributions cannot be had"
    state = RoundSet(closed_at=0.0)
    state.seal(1.0)
    same_branch_peers = {PeerId(name): view for name, view in zip("abc", (ahead, third, fourth), strict=True)}
    assert FinalityRules(RULES, same_branch_peers).patience_ends(5, state, applied=True) == 7.0


def test_a_liar_gains_nothing_by_making_one_peers_set_another_one_than_that_of_all_others():
    liar, honest = told(settled=5, digest=OTHER), told(1, 1, digest=b"what all hold")
    assert standing(4.1, liar, honest, honest, honest) is None, "it holds what the liar gave it alone"


def test_who_has_settled_another_set_holds_up_no_agreement_of_more_than_half():
    ahead, same, late = told(settled=5, digest=OTHER), told(1, 1), told(0, 0)
    assert settles(1.5, ahead, same, same)
    assert not settles(1.5, ahead, same, late), "who has not sealed is waited for"
    assert not settles(1.5, ahead, ahead, same), "half have it so"
    assert not settles(1.5, ahead, ahead, same, same, told(1, 1, digest=OTHER))


def test_a_neighbour_that_counts_the_same_set_differently_from_one_progress_to_the_next_does_no_harm():
    view = told(digest=b"another!")
    rounds = {5: RoundSet()}
    view.compare(rounds, 0.0)
    assert view.due(9.0, lambda _: False) == (), "an empty set is none to ask for"
    view.sets = {5: OpenSet(5, 0, 0, 3, b"another!")}
    view.compare(rounds, 10.0)
    assert view.due(10.1, lambda _: False) == ()
    view.compare(rounds, 10.2)
    assert view.due(10.4, lambda _: False) == (5,)


def test_a_neighbour_that_forks_and_comes_back_with_the_set_it_had_is_compared_anew():
    view, rounds = told(digest=OTHER), {5: RoundSet()}
    view.sets = {5: OpenSet(5, 0, 0, 3, OTHER)}
    view.compare(rounds, 0.0)
    view.compare_anew()
    assert view.due(1.0, lambda _: False) == ()
    view.compare(rounds, 1.0)
    assert view.due(1.0, lambda _: False) == ()
    assert view.due(2.0, lambda _: False) == (5,)


def test_who_stood_still_believes_the_one_who_went_on_and_settles_nothing_by_itself():
    state = RoundSet(closed_at=0.0)
    state.seal(1.0)
    ahead, too = told(settled=5, digest=OTHER), told(2, 2)
    views = {PeerId(f"p{number}"): view for number, view in enumerate((ahead, too, too, too))}
    assert FinalityRules(RULES, views, 1).adopted_digest(5, state, 1.5) is None
    after = FinalityRules(RULES, views, 1, follows=True)
    assert after.adopted_digest(5, state, 1.5) == OTHER
    assert not after.may_settle(5, state, 99.0)
    views[PeerId("p0")] = told(2, 2)
    state.sealed = 2
    assert FinalityRules(RULES, views, 1).may_settle(5, state, 1.5)
    assert not after.may_settle(5, state, 1.5), "who went on may not be heard yet"
    assert after.patience_ends(5, state, applied=True) == float("inf"), "nothing to be woken for"


def test_who_stood_still_follows_for_a_while_only_and_not_after_a_short_stop():
    rounds = GroupRounds(rules=RULES, me=PeerId("me"), settled=-1, now=0.0)
    rounds.handle(ProcessSuspended(2.9), 1.0)
    assert not rounds.agreement.follows, "nobody has settled without it"
    rounds.handle(ProcessSuspended(3.0), 1.0)
    assert rounds.agreement.follows
    assert rounds.next_deadline() <= 4.0
    rounds.handle(TimePassed(), 3.9)
    assert rounds.agreement.follows
    rounds.handle(TimePassed(), 4.0)
    assert not rounds.agreement.follows, "a liar that it is left with decides no longer"
