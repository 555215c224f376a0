"""A peer whose contributions count for nothing, as it knows: it splits no set, loses and doubles nothing."""

from __future__ import annotations

from round_group import RULES, Group

from swarmnet.identifiers import PeerId

NEW = PeerId("peer3")


def group_with_a_newcomer(counts) -> Group:
    """`counts`: for the others, whether what the newcomer makes for a round does. It knows of nothing."""
    group = Group(4, seed=1)
    for name, machine in group.peers.items():
        if name == NEW:
            machine._own_count = lambda round: False
        machine.maker_counts = lambda maker, round: maker != NEW or counts(round)
    return group


def made_by(group: Group, maker: PeerId) -> dict:
    return {identity: each.round for identity, each in group.made.items() if each.peer == maker}


def in_sets(group: Group) -> set:
    return {each.id for sets in group.settled.values() for of in sets.values() for each in of}


def test_what_a_newcomer_proposes_is_in_no_set_and_nobody_waits_for_it():
    group = group_with_a_newcomer(lambda round: False)
    group.run(30.0, tokens_per_second=40.0)
    assert group.shared_rounds_are_equal() > 20, "rounds settle as fast as they are agreed on"
    of_it, settled = made_by(group, NEW), max(group.settled[NEW])
    assert not of_it.keys() & in_sets(group)
    due = {identity for identity, round in of_it.items() if round + 2 * RULES.window < settled}
    assert due
    assert due <= set(group.uncounted[NEW])
    assert len(group.uncounted[NEW]) == len(set(group.uncounted[NEW]))
    assert not any(group.given_back.values()), "of it nothing comes back"


def test_what_the_others_count_is_in_their_sets_and_its_own_though_it_did_not_know():
    group = group_with_a_newcomer(lambda round: True)
    group.run(40.0, tokens_per_second=20.0)
    assert group.shared_rounds_are_equal() > 10
    of_it = made_by(group, NEW)
    counted = of_it.keys() & in_sets(group)
    assert len(counted) > len(of_it) / 2
    assert not counted & {*group.uncounted[NEW], *group.given_back[NEW]}
    open_at = max(group.settled[NEW]) - 2 * RULES.window - 1
    old = {identity for identity, round in of_it.items() if round <= open_at}
    assert old <= counted | {*group.uncounted[NEW]}, "each is settled or uncounted"


def test_from_the_round_on_that_all_know_its_contributions_count():
    first = 12
    group = group_with_a_newcomer(lambda round: round >= first)
    group.peers[NEW]._own_count = lambda round: round >= first
    group.run(30.0, tokens_per_second=40.0)
    assert group.shared_rounds_are_equal() > first
    of_it = made_by(group, NEW)
    assert {of_it[identity] >= first for identity in of_it.keys() & in_sets(group)} == {True}
    assert group.given_back[NEW] == []
