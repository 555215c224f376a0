"""Who counts no more, by what settled: a fold that comes to the same for all who have the same sets."""

from __future__ import annotations

import pytest

from swarmnet.audits.commitment import MOST_ACCUSED, NOT_YET, Accused, Commitment, settings_of
from swarmnet.audits.convictions import Convictions
from swarmnet.identifiers import PeerId

WINDOW = 4
LIAR = PeerId("liar")
CPU, CARD = settings_of(b"text", "cpu"), settings_of(b"text", "card")


def said(settings: bytes = CPU, **accused: int) -> Commitment:
    those = tuple(Accused(PeerId(peer), first) for peer, first in accused.items())
    return Commitment(9, 9, settings, bytes(16), bytes(32), bytes(32), (), those)


def a_set(yes: int, no: int, others: int = 0, **keys: int) -> dict[PeerId, Commitment]:
    """So many say that the liar lied, so many who could tell do not, and so many compute otherwise."""
    named = keys or {"liar": NOT_YET}
    found = {PeerId(f"yes {number}"): said(**named) for number in range(yes)}
    found |= {PeerId(f"no {number}"): said() for number in range(no)}
    found |= {PeerId(f"card {number}"): said(CARD) for number in range(others)}
    return found | {LIAR: said(CPU, **{"yes 0": NOT_YET})}


def test_more_than_half_of_those_who_can_judge_convict_and_all_others_follow():
    convictions = Convictions(WINDOW)
    assert convictions.settled(10, a_set(yes=2, no=2)) == []
    assert convictions.settled(11, a_set(yes=3, no=2, others=4)) == [LIAR]
    assert convictions.first == {LIAR: 11 + WINDOW + 1}
    assert convictions.settled(12, a_set(yes=4, no=1)) == [], "that is no news"


@pytest.mark.parametrize(("yes", "no", "others"), [(1, 0, 0), (1, 0, 9), (2, 0, 5), (3, 0, 7)])
def test_neither_one_alone_convicts_nor_few_that_claim_rare_settings(yes, no, others):
    convictions = Convictions(WINDOW)
    assert convictions.settled(10, a_set(yes, no, others)) == []
    assert convictions.first == {}


def test_nobody_convicts_whose_settings_it_does_not_have():
    convictions = Convictions(WINDOW)
    of_set = a_set(yes=0, no=0) | {PeerId(f"c{number}"): said(CARD, liar=NOT_YET) for number in range(9)}
    assert convictions.settled(10, of_set) == []


def test_who_comes_later_learns_it_from_any_set_with_the_round_that_all_have():
    early, late = Convictions(WINDOW), Convictions(WINDOW)
    early.settled(10, a_set(yes=3, no=0))
    first = early.first[LIAR]
    assert early.accused(()) == (Accused(LIAR, first),)
    repeated = a_set(3, 0, 0, liar=first)
    del repeated[LIAR]
    assert late.settled(40, repeated) == [LIAR]
    assert late.first == early.first


def test_who_heard_it_in_between_corrects_itself_to_the_earlier_round():
    convictions = Convictions(WINDOW)
    convictions.settled(11, a_set(yes=3, no=0))
    assert convictions.settled(14, a_set(3, 0, 0, liar=15)) == [LIAR]
    assert convictions.first == {LIAR: 15}
    assert convictions.settled(15, a_set(3, 0, 0, liar=30)) == []


def test_the_word_of_who_is_convicted_counts_no_more():
    convictions = Convictions(WINDOW)
    convictions.settled(10, a_set(yes=3, no=0))
    first = convictions.first[LIAR]
    slander = {PeerId("liar"): said(honest=NOT_YET), PeerId("friend"): said(honest=NOT_YET)}
    assert convictions.settled(first, {**slander, PeerId("honest"): said()}) == []


def test_a_peer_says_of_whom_it_has_proofs_and_whom_it_follows_the_newest_of_them():
    convictions = Convictions(WINDOW)
    convictions.settled(10, a_set(yes=3, no=0))
    mine = convictions.accused((LIAR, PeerId("another")))
    assert mine == (Accused(LIAR, 15), Accused(PeerId("another"), NOT_YET))
    many = tuple(PeerId(str(number)) for number in range(40))
    assert len(convictions.accused(many)) == MOST_ACCUSED
