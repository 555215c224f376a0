"""Questions that run ahead: who is asked, what an answer changes, and that a way is found or given up."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.capacity import Booking, Load
from swarmnet.routing.reservation_requests import (
    ANSWER_SECONDS,
    DEAR,
    GIVE_UP_QUESTIONS,
    HALVED_VISITS,
    MAX_QUESTIONS,
    MIN_SHARE,
    PathQuery,
    PathSearch,
)
from swarmnet.run.path_rules import PathRules, begin, check

RULES = PathRules.of(4, 0.25)
B, C, C2, D = (PeerId(name) for name in ("b", "c", "c2", "d"))
LIVE = [(B, 1), (C, 2), (C2, 2)]
KEY = MicrobatchId(PeerId("origin"), 7)
IDLE = Load(2, 1.0, 2.0)
TO_GO = {1: 10.0, 2: 30.0}


def scouting(rules=RULES, **hops):
    """On the first stage; everybody is idle and has told so."""
    made = PathSearch(rules, 0)
    for peer in (B, C, C2):
        made.on_load_report(peer, IDLE, TO_GO, 0.0, 0.0)
        made.measured(peer, hops.get(peer, 1.0))
    made.quests[KEY] = PathQuery(begin(RULES), 0.0)
    return made


def test_the_nearest_is_asked_first_and_who_says_yes_gets_the_body():
    scouts = scouting(b=3.0, c=1.0, c2=2.0)
    asking = scouts.seek(KEY, LIVE, 0.0)
    assert (asking.peer, asking.arrival, asking.start, asking.firm) == (C, 1.0, 1.0, False)
    quest = scouts.answered(C, KEY, asking.question, 1.2)
    assert quest.granted == C
    assert scouts.back(quest, 1.2) == 1.2 + 3.0 + 10.0 + 1.0


def test_a_no_with_the_news_that_explain_it_leads_to_the_next_best():
    scouts = scouting(b=9.0, c=1.0, c2=2.0)
    first = scouts.seek(KEY, LIVE, 0.0)
    full = (Booking(0.0, 40.0), Booking(0.0, 40.0))
    scouts.on_load_report(C, Load(2, 1.0, 2.0, full), TO_GO, 0.0, 0.0)
    assert scouts.answered(C, KEY, first.question, None).granted is None
    assert scouts.seek(KEY, LIVE, 0.0).peer == C2


def test_an_answer_to_an_older_question_or_from_somebody_else_is_none():
    scouts = scouting(c=0.5)
    first = scouts.seek(KEY, LIVE, 0.0)
    assert scouts.answered(C2, KEY, first.question, 1.0) is None
    scouts.answered(C, KEY, first.question, None)
    scouts.seek(KEY, LIVE, 0.0)
    assert scouts.answered(C, KEY, first.question, 1.0) is None


def test_who_does_not_answer_is_not_asked_again_for_that_microbatch():
    scouts = scouting(c=0.5, c2=0.6)
    assert scouts.seek(KEY, LIVE, 0.0).peer == C
    assert scouts.overdue(ANSWER_SECONDS - 0.01) == []
    assert scouts.overdue(ANSWER_SECONDS) == [KEY]
    assert scouts.seek(KEY, LIVE, 2.0).peer == C2


def test_the_loss_of_a_peer_concerns_those_that_asked_it_or_have_a_place_there_and_no_body_sent():
    scouts = scouting(c=0.5)
    scouts.seek(KEY, LIVE, 0.0)
    assert scouts.lost(C2) == []
    assert scouts.lost(C) == [KEY]
    asking = scouts.seek(KEY, LIVE, 0.0)
    scouts.answered(asking.peer, KEY, asking.question, 1.0)
    assert scouts.lost(asking.peer) == [KEY]
    scouts.quests[KEY].sent = True
    assert scouts.lost(asking.peer) == []


def test_bookings_are_told_in_seconds_from_when_they_were_said():
    scouts = scouting()
    scouts.on_load_report(C, Load(2, 1.0, 2.0, (Booking(-1.0, 5.0),)), TO_GO, 0.1, 100.0)
    assert scouts.seen[C].load.bookings == (Booking(98.9, 104.9),)


def test_one_slow_answer_keeps_nobody_away_and_who_was_far_is_tried_again():
    scouts = scouting(b=9.0, c=1.0, c2=1.5)
    for hop in (1.0, 1.0, 60.0):
        scouts.measured(C, hop)
    assert scouts.seen[C].hop == 1.0
    scouts.granted_places += int(3 * HALVED_VISITS)  # None of them went by b.
    for peer in (C, C2):
        scouts.measured(peer, 2.0)
        scouts.measured(peer, 2.0)
    asked = {scouts.seek(KEY, [(B, 1), (peer, 2)], 0.0).peer for peer in (C, C2)}
    assert B in asked


def test_an_unknown_peer_is_tried_once_and_not_by_all_at_the_same_time():
    scouts = scouting(c=1.0, c2=1.0)
    new = PeerId("new")
    scouts.on_load_report(new, IDLE, TO_GO, 0.0, 0.0)
    asked = []
    for number in range(3):
        key = MicrobatchId(KEY.origin, number)
        scouts.quests[key] = PathQuery(begin(RULES), 0.0)
        asked.append(scouts.seek(key, [*LIVE, (new, 2)], 0.0).peer)
    assert asked.count(new) == 1


def visits_by_stage(microbatches, whole=0, rules=RULES, **hops):
    """Those that go to stage 1 and 2, whose ways differ by their hops alone; before each, `whole` others
    leave nothing out."""
    scouts = scouting(rules, **hops)
    for peer, _ in LIVE:
        scouts.on_load_report(peer, IDLE, {1: 10.0, 2: 10.0}, 0.0, 0.0)
    visits = []
    for number in range(microbatches * (whole + 1)):
        key = MicrobatchId(KEY.origin, number)
        leaves_out = number % (whole + 1) == whole
        scouts.quests[key] = PathQuery(begin(RULES, None if leaves_out else RULES.stages), 0.0)
        asking = scouts.seek(key, LIVE, 0.0)
        scouts.answered(asking.peer, key, asking.question, asking.start)
        scouts.measured(asking.peer, hops.get(asking.peer, 1.0))
        if leaves_out:
            visits.append(dict(LIVE)[asking.peer])
    return visits.count(1), visits.count(2)


def test_where_all_ways_are_alike_the_stages_take_turns():
    assert visits_by_stage(40) == (20, 20)
    assert visits_by_stage(40, whole=3) == (20, 20), "those that could not choose do not count"


def test_a_stage_that_is_farther_away_gets_some_all_the_same_unless_it_is_much_farther():
    least = MIN_SHARE / 2
    nearby, rest = visits_by_stage(1000, b=3.0)
    assert least <= nearby / 1000 <= least + 0.05
    assert nearby + rest == 1000
    far = IDLE.compute_seconds + 10.0
    assert visits_by_stage(100, b=DEAR * far)[0] == 0


def test_the_more_microbatches_are_whole_the_more_evenly_the_others_leave_stages_out():
    nearby, _ = visits_by_stage(1000, rules=PathRules.of(4, 0.25, full_path_fraction=0.7), b=3.0)
    assert 0.35 <= nearby / 1000 <= 0.4


def test_stages_get_as_much_as_ways_lead_on_from_them():
    rules = PathRules.of(6, 1 / 3)
    made = PathSearch(rules, 0)
    stages = {PeerId(str(stage)): stage for stage in (1, 2, 3)}
    for peer in stages:
        costs = {1: 10.0, 2: 10.0}
        made.on_load_report(peer, IDLE, costs, 0.0, 0.0)
        made.measured(peer, 1.0)
    visits = Counter()
    for number in range(600):
        key = MicrobatchId(KEY.origin, number)
        made.quests[key] = PathQuery(begin(rules), 0.0)
        asking = made.seek(key, list(stages.items()), 0.0)
        made.answered(asking.peer, key, asking.question, asking.start)
        visits[stages[asking.peer]] += 1
    # Three ways lead on from stage 1, two from stage 2, and one from stage 3.
    assert all(abs(visits[stage] - wanted) < 10 for stage, wanted in ((1, 300), (2, 200), (3, 100)))


peers_drawn = st.lists(st.tuples(st.integers(1, 5), st.floats(0, 5), st.integers(0, 6)), max_size=12)


@given(peers_drawn, st.integers(0, 2), st.integers(0, 3), st.integers(0, 999))
def test_whoever_is_there_and_whatever_they_answer_every_question_is_legal_and_questions_end(
    drawn, skipped, memory, seed
):
    rules, chance = PathRules(6, skipped), Random(seed)
    scouts = PathSearch(rules, 0)
    live = []
    for number, (stage, hop, held) in enumerate(drawn):
        peer = PeerId(str(number))
        live.append((peer, stage))
        bookings = tuple(Booking(0.0, chance.uniform(1, 99)) for _ in range(held))
        table = {hops: chance.uniform(0, 9) for hops in range(6) if chance.random() < 0.8}
        scouts.on_load_report(peer, Load(memory + 1, 1.0, 2.0, bookings), table, chance.uniform(0, 1), 0.0)
        if chance.random() < 0.7:
            scouts.measured(peer, hop)
    scouts.quests[KEY] = PathQuery(begin(rules), 3.0)
    asked = 0
    while (asking := scouts.seek(KEY, live, 0.0)) is not None:
        asked += 1
        check(asking.header, dict(live)[asking.peer], rules)
        assert asking.start >= asking.arrival >= 3.0
        assert asking.firm == (asking.question >= MAX_QUESTIONS)
        if chance.random() < 0.2:
            assert scouts.answered(asking.peer, KEY, asking.question, asking.start).granted == asking.peer
            return
        scouts.answered(asking.peer, KEY, asking.question, None)
    assert asked <= GIVE_UP_QUESTIONS
