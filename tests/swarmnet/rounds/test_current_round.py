"""When a round closes, by what this peer and its allies have gathered, and by who has left it."""

from __future__ import annotations

from swarmnet.identifiers import PeerId
from swarmnet.membership.guests import MAX_GUESTS
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.contributors import MAX_CONTRIBUTORS
from swarmnet.rounds.open_round import CurrentRound
from swarmnet.rounds.result_table import tag_key, tag_of
from swarmnet.rounds.settlement import FinalityRules
from swarmnet.run.schema import Rounds

ME = PeerId("me")
RULES = Rounds(global_batch_tokens=100, max_seconds=5.0, contribution_timeout_seconds=1.0)


def group(*same_branch_peers: NeighbourView) -> tuple[CurrentRound, FinalityRules]:
    """This peer in round 3, which opened at 0.0, and its allies."""
    views = {PeerId(f"ally {number}"): view for number, view in enumerate(same_branch_peers)}
    current = CurrentRound(rules=RULES, me=ME, number=3, same_branch_peers=views, now=0.0)
    return current, FinalityRules(RULES, views)


def branch_peer(round: int, tokens: int = 0, before: int = 0) -> NeighbourView:
    return NeighbourView(round=round, tokens=tokens, tokens_before=before, relation="same")


def test_a_round_is_full_when_the_group_has_its_tokens():
    current, _ = group(branch_peer(3, 40), branch_peer(3, 30))
    current.tokens = 29
    assert not current.full(1.0)
    current.tokens = 30
    assert current.full(1.0)


def test_nobody_can_claim_more_than_half_of_a_rounds_tokens():
    current, _ = group(branch_peer(3, 10**9), branch_peer(3, 20))
    current.tokens = 29
    assert not current.full(1.0)
    current.tokens = 30
    assert current.full(1.0)
    current, _ = group(*[branch_peer(3, 10**9), *[branch_peer(3, 0)] * 8])
    current.peers, current.all_in_sight = 50, False
    assert current.tokens_of_group() <= 50, "one of a few in sight is one of many, too"


def test_tokens_of_another_round_do_not_count_but_those_of_who_just_went_on_do():
    current, _ = group(branch_peer(2, 90), branch_peer(5, 90), branch_peer(4, 7, before=50))
    current.tokens = 40
    assert current.tokens_of_group() == 90


def test_time_alone_closes_a_round_only_if_something_was_gathered():
    current, _ = group(branch_peer(3))
    assert not current.full(6.0)
    current.tokens = 1
    assert not current.full(4.9)
    assert current.full(5.0)


def test_those_in_sight_stand_for_a_group_that_is_not():
    current, _ = group(*[branch_peer(3, 2)] * 9)
    current.tokens = 2
    current.peers, current.all_in_sight = 50, False
    assert current.tokens_of_group() == 100
    assert current.share == 2


def test_keys_that_join_and_contribute_nothing_do_not_close_rounds_earlier():
    current, _ = group(*[branch_peer(3, 2)] * 9)
    current.tokens = 2
    current.peers, current.all_in_sight = 10_012, False
    current.settled(frozenset(tag_of(PeerId(f"ally {number}")) for number in range(12)))
    assert current.tokens_of_group() == 24
    assert current.share == 100 // 12
    for _ in range(RULES.window):
        current.settled(frozenset(tag_of(PeerId(f"ally {number}")) for number in range(5)))
    assert current.tokens_of_group() == 20, "of those that are linked, all count"


def votes(known, without=()):
    """Whether the votes of so many allies and of this peer have weight."""
    peers = [ME, *(PeerId(f"ally {number}") for number in range(known))]
    return {tag_key(tag_of(peer)): peer not in without for peer in peers}


def test_tokens_of_peers_whose_votes_have_no_weight_close_no_round():
    current, _ = group(*[branch_peer(3, 2)] * 5, *[branch_peer(3, 50)] * 20)
    current.tokens = 2
    assert current.tokens_of_group() == 1012, "nobody is known yet"
    current.weigh(votes(5))
    assert current.tokens_of_group() == 12, "twenty newcomers"
    current.weigh(votes(25, [PeerId(f"ally {number}") for number in range(5, 25)]))
    assert current.tokens_of_group() == 12, "twenty liars"
    current.weigh(votes(25, [ME]))
    assert current.tokens_of_group() == 1010, "its own do not count either"
    assert current.full(0.0)


def test_ten_thousand_keys_without_weight_close_no_round_however_many_contribute_or_are_linked():
    current, _ = group(*[branch_peer(3, 2)] * 9, *[branch_peer(3, 10**6)] * MAX_GUESTS)
    current.tokens = 2
    current.peers, current.all_in_sight = 10_010, False
    contributors = [ME, *(PeerId(f"ally {number}") for number in range(MAX_CONTRIBUTORS - 1))]
    current.settled(frozenset(map(tag_of, contributors)))
    assert current.full(0.0)
    assert current.active_peers == MAX_CONTRIBUTORS
    current.weigh(votes(9))
    assert current.with_weight(contributors) == set(contributors[:10])
    assert current.active_peers == 10
    assert current.tokens_of_group() == 20
    current.weigh(votes(18))
    assert current.active_peers == 19, "nine whose votes have weight by now"
    current.weigh({})
    assert current.active_peers == MAX_CONTRIBUTORS, "of another branch, where none is known"


def test_all_tokens_count_while_few_peers_in_sight_are_known():
    for known, tokens in ((3, 60), (4, 10)):
        current, _ = group(*[branch_peer(3, 2)] * 4, branch_peer(3, 50))
        current.tokens = 2
        current.weigh(votes(known))
        assert current.tokens_of_group() == tokens
    current.weigh(votes(4, [ME, *(PeerId(f"ally {number}") for number in range(4))]))
    assert current.tokens_of_group() == 60, "none has weight"


def test_tokens_of_a_newcomer_alone_close_a_round_when_its_time_is_up():
    current, _ = group(*[branch_peer(3)] * 6)
    current.weigh({key: vote for key, vote in votes(6).items() if key != tag_key(tag_of(ME))})
    current.tokens = 200
    assert not current.full(4.9)
    assert current.full(5.0)


def test_peers_whose_votes_have_no_weight_are_not_followed():
    current, agreement = group(*[branch_peer(3)] * 5, *[branch_peer(4)] * 20)
    current.weigh(votes(5))
    assert not current.is_left(agreement, True, 10.0)
    assert not current.is_left(agreement, True, 100.0)
    current.weigh({})
    assert current.is_left(agreement, True, 100.0)


def test_who_joins_or_leaves_is_counted_anew():
    one = branch_peer(3, 20)
    views = {PeerId(f"ally {number}"): branch_peer(3, 2) for number in range(6)}
    current = CurrentRound(rules=RULES, me=ME, number=3, same_branch_peers=views, now=0.0)
    current.weigh(votes(7))
    assert current.tokens_of_group() == 12
    views[PeerId("ally 6")] = one
    assert current.tokens_of_group() == 32
    del views[PeerId("ally 0")]
    assert current.tokens_of_group() == 30


def test_one_who_went_on_alone_is_followed_after_the_deadline_half_of_the_group_at_once():
    current, agreement = group(branch_peer(4), branch_peer(3), branch_peer(3), branch_peer(3))
    assert not current.is_left(agreement, True, 10.0)
    assert not current.is_left(agreement, True, 10.9)
    assert current.is_left(agreement, True, 11.0)
    current, agreement = group(branch_peer(4), branch_peer(4), branch_peer(3))
    assert current.is_left(agreement, True, 10.0)


def test_a_claim_to_have_gone_on_counts_late_where_nothing_was_contributed():
    current, agreement = group(branch_peer(4), branch_peer(3), branch_peer(3), branch_peer(3))
    assert not current.is_left(agreement, False, 10.0)
    assert not current.is_left(agreement, False, 14.9)
    assert current.is_left(agreement, False, 15.0)


def test_one_who_went_on_is_followed_at_once_where_half_of_the_tokens_are_there():
    current, agreement = group(branch_peer(4, before=25), branch_peer(3), branch_peer(3), branch_peer(3))
    current.tokens = 24
    assert not current.is_left(agreement, True, 10.0)
    current.tokens = 25
    assert current.is_left(agreement, True, 10.0)


def test_who_came_back_to_the_round_is_not_held_against_it():
    one = branch_peer(4)
    current, agreement = group(one, branch_peer(3), branch_peer(3))
    assert not current.is_left(agreement, True, 10.0)
    one.round = 3
    assert not current.is_left(agreement, True, 10.5)
    one.round = 4
    assert not current.is_left(agreement, True, 11.0), "the second time counts from now"


def test_going_on_forgets_the_tokens_of_those_who_are_not_there_yet():
    current, _ = group(branch_peer(3, 40), branch_peer(4, 8))
    current.go_on(2.0)
    assert current.number == 4
    assert current.tokens_of_group() == 8
    assert current.next_deadline() == 7.0
