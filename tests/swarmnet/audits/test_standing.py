"""Whose contributions count, by what settled: a fold, the same for all who have the same sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm import tiny_manifest

from swarmnet.audits.commitment import (
    MOST_CHANGES,
    NOT_YET,
    Accused,
    Change,
    Commitment,
    Found,
    Kind,
    Word,
    settings_of,
)
from swarmnet.audits.standing import ENOUGH, IN_A_ROW, SEVERAL, Standings, Terms
from swarmnet.identifiers import PeerId
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.manifest import Rounds, Sync

TERMS = Terms(fee=4, lag=5, founding=3, due=20, term=40, kept=30)
FOUNDERS = tuple(PeerId(name) for name in "abcd")
A, B, C, D = FOUNDERS
NEW = PeerId("new")
CPU, CARD = settings_of(b"text", "cpu"), settings_of(b"text", "card")


class Sets:
    """What settles, round by round; the founders are in all of it, and find one another to agree."""

    def __init__(self, standings: Standings, *, agree: bool = True) -> None:
        self.standings, self.round, self.agree = standings, -1, agree
        self.settings = {}
        self.silent: set[PeerId] = set()
        self.accusing: dict[PeerId, PeerId] = {}
        self.finds = lambda auditor, round: ()
        self.members = list(FOUNDERS)
        self.changed: list[Change] = []

    def said(self, peer: PeerId) -> Commitment:
        others = [other for other in self.members if self.agree and other not in (peer, *self.silent)]
        found = [Found(tag_of(other), self.round - 1, 1, Word.AGREES) for other in others]
        found += self.finds(peer, self.round)
        settings = self.settings.get(peer, CPU)
        accused = tuple(Accused(self.accusing[peer], NOT_YET) for _ in range(peer in self.accusing))
        return Commitment(
            self.round, self.round, settings, bytes(16), bytes(32), bytes(32), (), accused, tuple(found),
            self.standings.changes,
        )  # fmt: skip

    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round += 1
            said = {peer: self.said(peer) for peer in self.members if self.counts(peer)}
            self.changed += self.standings.settled(self.round, self.chain(self.round), said)

    def chain(self, round: int) -> bytes:
        return bytes([round % 256]) * 32

    def counts(self, peer: PeerId, ahead: int = 0) -> bool:
        return self.standings.counts(peer, self.round + ahead)

    def vouch(self, of: PeerId, by=FOUNDERS, settings: bytes = CPU, likeness: int = 0) -> None:
        """These look into a window of that peer that ended two rounds ago, if it is their turn."""

        def finds(auditor: PeerId, round: int):
            drawn = self.standings.auditors(tag_of(of), round - 2, settings)
            if auditor in by and tag_of(auditor) in drawn:
                word = Word.ALIKE if likeness else Word.AGREES
                return (Found(tag_of(of), round - 2, 1, word, likeness),)
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


def test_who_has_a_proof_of_a_lie_is_one_of_those_who_asked_in_vain(sets):
    sets.accusing = {A: D}
    sets.finds = lambda auditor, round: (Found(tag_of(D), round - 1, 1, Word.UNANSWERED),) * (auditor == B)
    sets.silent = {D}
    sets.go_on(IN_A_ROW - 1)
    assert sets.changed == []
    sets.go_on(1)
    assert [(change.peer, change.kind) for change in sets.changed] == [(tag_of(D), Kind.NONE)]


def test_fewer_than_half_who_say_that_it_did_not_answer_take_nothing_from_it(sets):
    sets.finds = lambda auditor, round: (
        (Found(tag_of(C), round - 1, 1, Word.UNANSWERED),) if auditor in (D,) else ()
    )
    sets.go_on(3 * TERMS.term)
    assert sets.changed == []


def test_who_changes_its_settings_counts_as_before_since_all_can_judge_it(sets):
    sets.settings[D] = CARD
    sets.go_on(3 * TERMS.term)
    assert sets.changed == []


def test_where_everybody_has_other_settings_newcomers_come_and_peers_stay_by_what_is_alike():
    sets = Sets(Standings(TERMS, -1), agree=False)
    sets.settings = {peer: settings_of(b"text", peer) for peer in FOUNDERS}
    kept = alike(sets, dict.fromkeys(FOUNDERS, 998))
    sets.go_on(3 * TERMS.term)
    assert sets.changed == []
    sets.vouch(NEW, likeness=996)
    newcomers = sets.finds
    sets.finds = lambda auditor, round: (*kept(auditor, round), *newcomers(auditor, round))
    sets.go_on(max(TERMS.fee, SEVERAL))
    assert [(change.peer, change.kind) for change in sets.changed] == [(tag_of(NEW), Kind.JUDGED)]


def test_where_most_are_found_to_agree_by_nobody_no_term_ends():
    sets = Sets(Standings(TERMS, -1))
    sets.silent = {B, C, D}
    sets.go_on(4 * TERMS.term)
    assert sets.changed == [], "it is audits that fail, and somebody must count"


def alike(sets: Sets, those: dict[PeerId, int], by=FOUNDERS):
    """From now on auditors find each round how alike these are, and say nothing of others."""
    sets.finds = lambda auditor, round: tuple(
        Found(tag_of(peer), round - 1, 1, Word.ALIKE, each if not callable(each) else each(round))
        for peer, each in those.items() if auditor in by and peer != auditor
    )
    return sets.finds


@pytest.fixture
def strangers() -> Sets:
    """No two of them compute with the same settings."""
    sets = Sets(Standings(TERMS, -1), agree=False)
    sets.settings = {peer: settings_of(b"text", peer) for peer in FOUNDERS}
    alike(sets, dict.fromkeys(FOUNDERS, 998))
    sets.go_on(TERMS.founding + TERMS.lag + 2)
    return sets


def test_a_newcomer_is_let_in_by_the_mean_over_several_windows_and_never_by_one(strangers):
    of_all = strangers.finds
    strangers.standings.terms = replace(TERMS, fee=1)
    strangers.vouch(NEW, likeness=1000)
    newcomers = strangers.finds
    strangers.finds = lambda auditor, round: (*of_all(auditor, round), *newcomers(auditor, round))
    strangers.go_on(SEVERAL - 1)
    assert strangers.changed == []
    strangers.go_on(1)
    assert [change.kind for change in strangers.changed] == [Kind.JUDGED]


def test_a_newcomer_that_is_not_alike_enough_counts_for_nothing_though_a_friend_says_otherwise(strangers):
    of_all = strangers.finds
    strangers.vouch(NEW, likeness=ENOUGH - 1)
    honest = strangers.finds
    strangers.vouch(NEW, by=(D,))
    friend = strangers.finds

    def finds(auditor, round):
        return (*of_all(auditor, round), *(friend if auditor == D else honest)(auditor, round))

    strangers.finds = finds
    strangers.go_on(10 * TERMS.fee)
    let_in = [change for change in strangers.changed if change.peer == tag_of(NEW)]
    assert let_in == [], "one of four is drawn for half of its windows"


def test_who_is_not_alike_loses_its_standing_by_several_windows_of_most_auditors(strangers):
    strangers.go_on((SEVERAL - strangers.round - 1) % SEVERAL)
    alike(strangers, dict.fromkeys(FOUNDERS, 998) | {D: 0})
    strangers.go_on(SEVERAL - 1)
    assert strangers.changed == [], "never by one"
    strangers.go_on(1)
    assert [(change.peer, change.kind) for change in strangers.changed] == [(tag_of(D), Kind.NONE)]


def test_one_bad_window_among_good_ones_takes_nothing_from_anybody(strangers):
    alike(strangers, dict.fromkeys(FOUNDERS, 998) | {D: lambda round: 960 if round % SEVERAL == 0 else 999})
    strangers.go_on(3 * TERMS.term)
    assert strangers.changed == []
    assert not strangers.standings.is_doubted(D)


def test_the_word_of_one_that_others_are_not_alike_orders_one_look_by_those_of_their_kind_and_no_more(sets):
    sets.agree = False
    slander = dict.fromkeys((A, B, C), 0)

    def finds(auditor, round):
        others = [peer for peer in FOUNDERS if peer != auditor]
        if auditor != D:
            return tuple(Found(tag_of(peer), round - 1, 1, Word.AGREES) for peer in others)
        return tuple(Found(tag_of(peer), round - 1, 1, Word.ALIKE, slander[peer]) for peer in (A, B, C))

    sets.finds = lambda auditor, round: finds(auditor, round) if auditor == D else ()
    sets.go_on(SEVERAL)
    assert all(sets.standings.is_due(peer, sets.round) for peer in (A, B, C))
    assert sets.standings.auditors(tag_of(A), sets.round - 1, CPU), "of its kind first"
    sets.finds = finds
    sets.go_on(3 * TERMS.term)
    assert sets.changed == []
    assert not any(sets.standings.is_doubted(peer) for peer in (A, B, C))


def test_auditors_are_of_the_same_kind_where_there_are_enough_and_else_any(sets):
    sets.settings = {A: CARD, B: CARD}
    sets.go_on(1)
    for _ in range(10):
        sets.go_on(1)
        last = sets.round - 1
        assert set(sets.standings.auditors(tag_of(NEW), last, CARD)) == {tag_of(A), tag_of(B)}
        assert set(sets.standings.auditors(tag_of(C), last, CPU)) <= {tag_of(peer) for peer in (A, B, D)}
        assert len(sets.standings.auditors(tag_of(NEW), last, settings_of(b"text", "third"))) == 2
        assert set(sets.standings.exact_auditors(tag_of(A), last, CARD)) == {tag_of(B)}
    sets.members += [PeerId(f"another {number}") for number in range(3)]
    sets.standings.know(map(tag_of, sets.members), sets.round)
    sets.go_on(2)
    drawn = {sets.standings.auditors(tag_of(PeerId(str(n))), sets.round - 1, CARD) for n in range(20)}
    assert len(drawn) > 2, "two of seven are not enough to be asked alone"


words = st.tuples(st.sampled_from(list(Word)), st.integers(0, 2**32 - 1), st.integers(0, 1000))


@given(st.lists(words, max_size=12))
def test_whatever_one_says_of_others_nobody_loses_anything_by_it_and_no_newcomer_is_let_in(words):
    sets = Sets(Standings(TERMS, -1))
    sets.go_on(TERMS.founding + TERMS.lag + 2)
    said = iter(words * TERMS.term)

    def finds(auditor, round):
        if auditor != D or (word := next(said, None)) is None:
            return ()
        likeness = word[2] if word[0] is Word.ALIKE else 0
        return tuple(Found(tag_of(peer), word[1], 255, word[0], likeness) for peer in (A, B, C, D, NEW))

    sets.finds = finds
    sets.go_on(TERMS.term)
    assert sets.changed == []
    sets.silent, sets.finds = {B}, lambda auditor, round: ()
    sets.go_on(TERMS.term + TERMS.founding + TERMS.lag + 2)
    assert [change.peer for change in sets.changed] == [tag_of(B)], "nor does it keep anybody in for ever"


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
