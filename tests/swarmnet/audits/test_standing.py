"""Whose contributions count, by what settled: a fold, the same for all who have the same sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swarm import tiny_manifest

from swarmnet.audits.commitment import MOST_CHANGES, Change, Commitment, Found, Kind, Word, settings_of
from swarmnet.audits.standing import IN_A_ROW, STRANGERS, Standings, Terms
from swarmnet.identifiers import PeerId
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.manifest import Rounds, Sync

TERMS = Terms(fee=4, lag=5, founding=3, due=20, term=40, kept=30)
FOUNDERS = tuple(PeerId(name) for name in "abcd")
A, B, C, D = FOUNDERS
NEW = PeerId("new")
CPU, CARD = settings_of("cpu"), settings_of("card")


class Sets:
    """What settles, round by round; the founders are in all of it, and find one another to agree."""

    def __init__(self, standings: Standings, *, agree: bool = True) -> None:
        self.standings, self.round, self.agree = standings, -1, agree
        self.settings = {}
        self.silent: set[PeerId] = set()
        self.finds = lambda auditor, round: ()
        self.members = list(FOUNDERS)
        self.changed: list[Change] = []

    def said(self, peer: PeerId) -> Commitment:
        others = [other for other in self.members if self.agree and other not in (peer, *self.silent)]
        found = [Found(tag_of(other), self.round - 1, 1, Word.AGREES) for other in others]
        found += self.finds(peer, self.round)
        settings = self.settings.get(peer, CPU)
        repeated = self.standings.changes
        return Commitment(
            self.round, self.round, settings, bytes(16), bytes(32), bytes(32), (), (), tuple(found), repeated
        )

    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round += 1
            said = {peer: self.said(peer) for peer in self.members if self.counts(peer)}
            self.changed += self.standings.settled(self.round, self.chain(self.round), said)

    def chain(self, round: int) -> bytes:
        return bytes([round % 256]) * 32

    def counts(self, peer: PeerId, ahead: int = 0) -> bool:
        return self.standings.counts(peer, self.round + ahead)

    def vouch(self, of: PeerId, word: Word = Word.AGREES, by=FOUNDERS, settings: bytes | None = CPU) -> None:
        """These look into a window of that peer that ended two rounds ago, if it is their turn."""

        def finds(auditor: PeerId, round: int):
            drawn = self.standings.auditors(tag_of(of), round - 2, settings)
            if auditor in by and tag_of(auditor) in drawn:
                return (Found(tag_of(of), round - 2, 1, word),)
            return ()

        self.finds = finds


@pytest.fixture
def sets() -> Sets:
    sets = Sets(Standings(TERMS, -1))
    sets.go_on(TERMS.founding + TERMS.lag + 2)
    return sets


def test_who_is_in_the_first_sets_counts_and_nobody_who_comes_later(sets):
    assert all(sets.counts(peer) for peer in FOUNDERS)
    assert not sets.counts(NEW)
    assert Standings(TERMS, -1).counts(NEW, TERMS.founding), "at first nobody is known"


def test_a_newcomer_counts_some_rounds_after_enough_of_its_were_found_to_agree(sets):
    sets.vouch(NEW)
    sets.go_on(TERMS.fee)
    (change,) = sets.changed
    assert change == Change(tag_of(NEW), sets.round + TERMS.lag, Kind.JUDGED)
    assert not sets.counts(NEW, TERMS.lag - 1)
    assert sets.counts(NEW, TERMS.lag)


def test_a_newcomers_friend_alone_lets_it_in_by_no_number_of_words(sets):
    sets.vouch(NEW, by=(A,))
    sets.go_on(10 * TERMS.fee)
    assert sets.changed == []


def test_the_words_of_those_whose_turn_it_is_not_count_for_nothing(sets):
    drawn = sets.standings.auditors(tag_of(NEW), sets.round - 1, CPU)
    others = [peer for peer in FOUNDERS if tag_of(peer) not in drawn]
    assert len(drawn) == len(others) == 2
    of_one = Found(tag_of(NEW), sets.round - 1, TERMS.fee, Word.AGREES)
    sets.finds = lambda auditor, round: (of_one,) if auditor in others else ()
    sets.go_on(3)
    assert sets.changed == []
    sets.finds = lambda auditor, round: (of_one,) if auditor not in others else ()
    sets.go_on(1)
    assert [change.peer for change in sets.changed] == [tag_of(NEW)]


def test_neither_a_newcomer_nor_a_stranger_lets_anybody_in(sets):
    friend = PeerId("friend")
    sets.members += [friend]
    sets.standings._records[tag_of(friend)] = replace(
        sets.standings._records[tag_of(A)], kind=Kind.STRANGER, before=Kind.STRANGER, settings=CPU
    )
    assert not sets.standings.judges(friend, sets.round)
    sets.go_on(1)
    assert tag_of(friend) not in sets.standings.auditors(tag_of(NEW), sets.round - 1, None)


def test_who_never_answers_loses_its_standing_when_its_term_is_over(sets):
    sets.silent = {D}
    sets.go_on(TERMS.due + TERMS.founding + 1)
    assert sets.standings.is_due(D, sets.round)
    assert not sets.standings.is_due(A, sets.round)
    sets.go_on(TERMS.term - TERMS.due + TERMS.lag)
    assert [(change.peer, change.kind) for change in sets.changed] == [(tag_of(D), Kind.NONE)]
    assert not sets.counts(D)
    assert all(sets.counts(peer) for peer in (A, B, C))
    sets.silent = set()
    sets.vouch(D)
    sets.go_on(TERMS.fee + TERMS.lag)
    assert sets.counts(D), "with the fee it is as before"


def test_one_friend_does_not_keep_it_in_and_most_who_asked_in_vain_put_it_out(sets):
    sets.silent = {D}
    sets.finds = lambda auditor, round: (
        (Found(tag_of(D), round - 1, 1, Word.AGREES if auditor == A else Word.UNANSWERED),)
    )
    sets.go_on(IN_A_ROW - 1)
    assert sets.changed == [], "what gets lost on the way is no refusal"
    sets.go_on(1)
    (change,) = sets.changed
    assert (change.peer, change.kind) == (tag_of(D), Kind.NONE)


def test_fewer_than_half_who_say_that_it_did_not_answer_take_nothing_from_it(sets):
    sets.finds = lambda auditor, round: (
        (Found(tag_of(C), round - 1, 1, Word.UNANSWERED),) if auditor in (D,) else ()
    )
    sets.go_on(3 * TERMS.term)
    assert sets.changed == []


def test_other_settings_than_those_it_was_let_in_with_end_its_standing(sets):
    sets.settings[D] = CARD
    sets.go_on(1)
    assert [(change.peer, change.kind) for change in sets.changed] == [(tag_of(D), Kind.NONE)]


def test_where_nobody_can_judge_most_of_a_set_nobody_loses_anything():
    sets = Sets(Standings(TERMS, -1), agree=False)
    sets.settings = {peer: settings_of(peer) for peer in FOUNDERS}
    sets.go_on(4 * TERMS.term)
    assert sets.changed == []
    sets.settings = {peer: settings_of("another text", peer) for peer in FOUNDERS}
    sets.go_on(2)
    assert sets.changed == [], "a text that the owner withdraws changes the settings of all"


def test_where_most_are_found_to_agree_by_nobody_no_term_ends():
    sets = Sets(Standings(TERMS, -1))
    sets.silent = {B, C, D}
    sets.go_on(4 * TERMS.term)
    assert sets.changed == [], "it is audits that fail, and somebody must count"


def test_strangers_are_let_in_late_and_are_one_for_two_who_can_be_judged(sets):
    strangers = [PeerId(f"stranger {number}") for number in range(4)]
    findings = {}
    for stranger in strangers:
        sets.vouch(stranger, Word.FOREIGN, settings=None)
        findings[stranger] = sets.finds
    sets.finds = lambda auditor, round: tuple(
        found for of_one in findings.values() for found in of_one(auditor, round)
    )
    sets.settings |= {stranger: settings_of(stranger) for stranger in strangers}
    sets.go_on(STRANGERS * TERMS.fee - 1)
    assert sets.changed == []
    sets.go_on(1)
    let_in = [PeerId(name) for name in strangers if sets.counts(name, TERMS.lag)]
    assert len(let_in) == len(FOUNDERS) // 2
    sets.members += let_in
    sets.go_on(TERMS.lag + 20)
    assert len(sets.changed) == len(FOUNDERS) // 2, "and no more come while these are there"
    assert {change.kind for change in sets.changed} == {Kind.STRANGER}


def test_who_comes_later_learns_who_counts_from_sets_and_the_newest_changes(sets):
    late = Standings(TERMS, sets.round)
    assert late.counts(NEW, sets.round + 1), "as long as it knows nobody it follows the others"
    sets.vouch(NEW)
    sets.go_on(TERMS.fee + 1)
    said = {peer: sets.said(peer) for peer in FOUNDERS}
    learned = late.settled(sets.round, sets.chain(sets.round), said)
    assert learned == sets.changed
    for ahead in range(2 * TERMS.lag):
        for peer in (*FOUNDERS, NEW, PeerId("another")):
            assert late.counts(peer, sets.round + ahead) == sets.counts(peer, ahead)


def test_a_group_that_starts_again_knows_who_was_in_its_last_sets():
    again = Standings(TERMS, 70, map(tag_of, FOUNDERS))
    assert [again.counts(peer, 71) for peer in (A, D, NEW)] == [True, True, False]


def test_changes_are_repeated_for_some_time_the_newest_of_them(sets):
    sets.vouch(NEW)
    sets.go_on(TERMS.fee + TERMS.lag)
    assert [change.peer for change in sets.standings.changes] == [tag_of(NEW)]
    sets.members.append(NEW)
    sets.finds = lambda auditor, round: ()
    sets.go_on(TERMS.kept + TERMS.lag + 1)
    assert sets.standings.changes == ()
    assert sets.counts(NEW)
    assert MOST_CHANGES == 16


def test_terms_leave_time_for_what_is_audited_at_the_share_of_the_run():
    sync = Sync(method="local-steps", afresh_rounds=2, audits=0.05, fee=8)
    terms = Terms.of(tiny_manifest((3,), sync=sync, rounds=Rounds(snapshot_rounds=4, window=4)))
    assert (terms.fee, terms.lag, terms.due, terms.kept) == (8, 5, 120, 16)
    assert terms.term == 160 + 2 * 16
