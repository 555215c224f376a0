"""Which stage a peer serves: who moves, when, and that no stage is ever emptied by it."""

from __future__ import annotations

from collections import Counter
from math import prod
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.model.parameters import EMBEDDING, parameter_shapes
from swarmnet.placement.mover import (
    LOOKS_IN_VAIN,
    PATIENT_STARVING_SECONDS,
    STARVING_SECONDS,
    AnnounceMove,
    DirectoryQueried,
    GroupBeat,
    GroupPeerGone,
    Mover,
    MoveToStage,
    PlacementTick,
    QueryDirectory,
    Starving,
    Withdraw,
)
from swarmnet.placement.policy import (
    FASTEST,
    FRESH_SECONDS,
    Intent,
    MoveRules,
    ObservedPeer,
    View,
    apply_announced_moves,
    choose_move,
    choose_stage,
    period_seconds,
    stage_work,
    summarize_records,
    worthwhile,
)
from swarmnet.run.manifest import Manifest

ME, MATE, THIRD = PeerId("me"), PeerId("mate"), PeerId("third")
EQUAL = MoveRules((1.0, 1.0, 1.0))


def wish(view: View, stage: int = 0, rate: float = 1.0, rules: MoveRules = EQUAL, download: float = 10.0):
    return choose_move(view, ME, stage, rate, rules, download, Random(1))


def mover(rests_until: float = 0.0, download: float = 10.0) -> Mover:
    return Mover(ME, 0, EQUAL, Random(1), rests_until, download)


def at_once(machine: Mover, view: View, until: str) -> float:
    """Bring a machine to a phase by what `view` says; the time it got there."""
    now = machine.next_deadline()
    assert machine.handle(PlacementTick(), now) == [QueryDirectory()]
    effects = machine.handle(DirectoryQueried(view, 1.0), now)
    assert isinstance(effects[0], AnnounceMove)
    if until == "confirming":
        now = machine.next_deadline()
        assert machine.handle(PlacementTick(), now) == [QueryDirectory()]
        assert machine.handle(DirectoryQueried(view, 1.0), now) == []
    assert machine.phase == until
    return now


# -- what is worth it ---------------------------------------------------------------------------------


def test_a_difference_of_one_peer_is_left_alone_and_one_of_two_is_not():
    assert wish(View((5.0, 4.0, 5.0))) is None
    assert wish(View((6.0, 4.0, 5.0))) == Intent(ME, 0, 1, 1.0, 1.0)


def test_errors_in_measured_speeds_do_not_make_a_balanced_swarm_move():
    chance = Random(3)
    for _ in range(200):
        scattered = tuple(sum(chance.lognormvariate(0, 0.05) for _ in range(20)) for _ in range(3))
        assert wish(View(scattered), stage=scattered.index(max(scattered))) is None


def test_only_peers_of_the_richest_stage_move():
    view = View((9.0, 3.0, 12.0))
    assert wish(view, stage=0) is None, "else somebody moves to stage 0 afterwards"
    moved = wish(view, stage=2)
    assert moved is not None
    assert moved.target == 1


def test_a_peer_that_is_too_strong_to_be_missed_stays_and_a_weak_one_goes():
    view = View((11.0, 4.0, 11.0))
    assert wish(view, rate=10.0) is None, "it would only turn the shortage round"
    assert wish(view, rate=2.0) is not None


def test_a_slow_peer_does_not_move_for_the_little_that_it_brings():
    view = View((6.0, 4.0, 5.0), usual=1.0)
    assert wish(view, rate=0.5) is not None
    assert wish(view, rate=0.2) is None


def test_among_few_peers_8_percent_more_for_the_poorest_stage_are_worth_a_move():
    rules = MoveRules((2.0, 2.0, 1.36))
    move = Intent(ME, 1, 2, leaves=1 / 2, brings=1 / 1.36)
    assert worthwhile((3 / 2, 3 / 2, 1.2 / 1.36), move, rules, 0.0, median_brings=1 / 1.36), (
        "one gone, another slow"
    )
    assert not worthwhile((3 / 2, 3 / 2, 1.27 / 1.36), move, rules, 0.0, median_brings=1 / 1.36)
    slow = Intent(ME, 2, 1, leaves=0.2 / 1.36, brings=0.2 / 2)
    assert worthwhile((3 / 2, 2 / 2, 2.2 / 1.36), slow, rules, 0.0, median_brings=1 / 2), (
        "a tenth more, at no cost"
    )


def test_what_a_peer_brings_follows_from_the_work_of_the_stage():
    rules = MoveRules((1.0, 4.0))
    moved = choose_move(View((20.0, 2.0)), ME, 0, 2.0, rules, 1.0, Random(1))
    assert moved == Intent(ME, 0, 1, 2.0, 0.5)


def test_a_download_that_lasts_as_long_as_the_shortage_is_not_begun():
    view = View((8.0, 4.0, 6.0))
    assert wish(view, download=60.0) is not None
    assert wish(view, download=EQUAL.horizon_seconds) is None


def test_ten_thousand_peers_are_not_for_ever_evening_out_single_ones():
    assert wish(View((3004.0, 3000.0, 3000.0))) is None
    assert wish(View((3200.0, 3000.0, 3000.0))) is not None


def test_who_has_measured_nothing_and_who_moves_already_does_not_move():
    assert wish(View((9.0, 3.0, 6.0)), rate=0.0) is None
    enough = tuple(Intent(PeerId(f"p{number}"), 0, 1, 1.0, 1.0) for number in range(3))
    assert wish(View((9.0, 3.0, 6.0), enough)) is None, "three are on their way"


def test_who_has_measured_nothing_moves_all_the_same_where_a_stage_has_nobody():
    assert wish(View((2.0, 0.0, 1.0), usual=1.0), rate=0.0) == Intent(ME, 0, 1, 1.0, 1.0)
    assert wish(View((1.0, 0.0, 1.0), usual=1.0), rate=0.0) is None, "it would be missed where it is"


def test_a_stage_that_has_nobody_is_helped_by_whoever_leaves_somebody_behind():
    assert wish(View((2.0, 10.0, 0.0), usual=1.0)) is not None, "also from a stage that is not the richest"
    assert wish(View((9.0, 9.0, 0.0), usual=9.0), stage=1, rate=9.0) is None, "not by its stage's only peer"
    small = View((21.0, 20.0, 0.0), usual=20.0)
    assert wish(small, rate=1.0) is not None, "a slow one is better than none"
    assert wish(small, rate=20.0) is not None, "also where it leaves a slow one behind"
    assert wish(View((2.0, 1.0, 0.0), usual=1.0), download=1e5) is not None, "however long its download takes"
    strong = View((17.0, 1.0, 0.0), usual=1.0)
    assert wish(strong, rate=100.0) is not None, "it is counted as FASTEST times the usual at most"


def test_a_directory_that_is_silent_is_asked_again_soon():
    machine = mover()
    now = machine.next_deadline()
    machine.handle(PlacementTick(), now)
    assert machine.handle(DirectoryQueried(None, 1.0), now) == []
    assert machine.next_deadline() <= now + PATIENT_STARVING_SECONDS[1]


def test_who_arrives_looks_soon_though_it_may_not_move_yet():
    machine = Mover(ME, 0, EQUAL, Random(1), 1000.0, 10.0, arrived=100.0)
    assert 100.0 <= machine.next_deadline() <= 115.0


def test_of_all_who_announce_at_once_so_many_go_as_are_needed_and_all_compute_the_same():
    intents = tuple(Intent(PeerId(f"p{number}"), 0, 1, 1.0, 1.0) for number in range(20))
    capacities, going = apply_announced_moves(View((30.0, 20.0, 25.0), intents), EQUAL, 10.0)
    assert capacities == [25.0, 25.0, 25.0]
    assert len(going) == 5
    shuffled = View((30.0, 20.0, 25.0), tuple(reversed(intents)))
    assert apply_announced_moves(shuffled, EQUAL, 10.0) == (capacities, going)


capacity = st.floats(0.0, 50.0)
stage = st.integers(0, 2)
names = st.integers(0, 99).map(lambda number: PeerId(f"p{number}"))
intents = st.lists(
    st.builds(Intent, names, stage, stage, st.floats(0.01, 9.0), st.floats(0.01, 9.0)), max_size=12
)


@given(st.tuples(capacity, capacity, capacity), intents)
def test_announced_moves_never_make_the_poorest_stage_poorer(before, announced):
    announced = tuple(intent for intent in announced if intent.source != intent.target)
    after, _ = apply_announced_moves(View(before, announced), EQUAL, 10.0)
    assert min(after) >= min(before)


# -- what is known ------------------------------------------------------------------------------------


def test_capacities_are_what_the_fresh_records_add_up_to():
    seen = {
        "a": ObservedPeer(0, 2.0),
        "b": ObservedPeer(0, 4.0, moving_to=1),
        "c": ObservedPeer(1, 3.0),
        "d": ObservedPeer(9, 1.0),
    }
    seen["old"] = ObservedPeer(1, 5.0, age_seconds=FRESH_SECONDS + 1)
    view = summarize_records(((PeerId(name), record) for name, record in seen.items()), MoveRules((1.0, 2.0)))
    assert view == View((6.0, 3.0), (Intent(PeerId("b"), 0, 1, 4.0, 2.0),), 3, 4.0, there=(2, 1))


def test_a_peer_that_has_measured_nothing_counts_as_the_usual_one_and_a_liar_for_a_few():
    peers = [ObservedPeer(0, 2.0)] * 5 + [ObservedPeer(1, 0.0), ObservedPeer(2, 1e30)]
    view = summarize_records(((PeerId(str(number)), record) for number, record in enumerate(peers)), EQUAL)
    assert view.capacities == (10.0, 2.0, 2.0 * FASTEST)


seen = st.builds(ObservedPeer, st.integers(-3, 9), st.floats(0, 1e300), st.integers(-3, 9), st.floats(0, 1e9))


@given(st.lists(seen, max_size=8))
def test_no_records_whatever_they_say_make_it_fall(records):
    view = summarize_records(((PeerId(str(number)), record) for number, record in enumerate(records)), EQUAL)
    assert choose_stage(view, EQUAL, Random(1)) in range(3)
    for here in range(3):
        assert wish(view, here) is None or wish(view, here).target != here


def test_a_newcomer_takes_the_poorest_stage_once_those_who_announced_have_moved():
    assert choose_stage(View((5.0, 3.0, 4.0)), EQUAL, Random(1)) == 1
    coming = tuple(Intent(PeerId(f"p{number}"), 0, 1, 1.0, 1.0) for number in range(2))
    assert choose_stage(View((7.0, 3.0, 4.0), coming), EQUAL, Random(1)) == 2


def test_newcomers_of_an_empty_swarm_and_of_an_even_one_spread():
    for view in (View((0.0, 0.0, 0.0)), View((4.0, 4.1, 4.0))):
        drawn = Counter(choose_stage(view, EQUAL, Random(seed)) for seed in range(90))
        assert min(drawn[stage] for stage in range(3)) > 15


def test_a_swarm_of_400_looks_every_300_seconds_and_a_small_one_more_often():
    assert [period_seconds(peers) for peers in (2, 8, 100, 400, 10_000)] == [15.0, 15.0, 75.0, 300.0, 300.0]


# -- the machine --------------------------------------------------------------------------------------

SHORT = View((6.0, 3.0, 5.0))


def test_a_peer_announces_waits_looks_again_and_goes_when_a_mate_has_said_that_it_stays():
    machine = mover()
    now = at_once(machine, SHORT, "announced")
    assert EQUAL.recheck_seconds[0] <= machine.next_deadline() - now <= EQUAL.recheck_seconds[1]
    machine = mover()
    now = at_once(machine, SHORT, "confirming")
    assert machine.handle(GroupBeat(MATE, knows=False, stays=True), now) == []
    assert machine.handle(GroupBeat(THIRD, knows=True, stays=False), now) == []
    assert machine.handle(GroupBeat(MATE, knows=True, stays=True), now) == [MoveToStage(1)]
    assert machine.next_deadline() == float("inf")


def test_a_mate_that_announces_or_goes_in_the_meantime_is_no_reason_to_leave():
    for lost in (GroupBeat(MATE, knows=True, stays=False), GroupPeerGone(MATE)):
        machine = mover()
        now = at_once(machine, SHORT, "announced")
        machine.handle(GroupBeat(MATE, knows=True, stays=True), now)
        machine.handle(lost, now)
        now = machine.next_deadline()
        machine.handle(PlacementTick(), now)
        assert machine.handle(DirectoryQueried(SHORT, 1.0), now) == []
        (withdrawn,) = machine.handle(PlacementTick(), machine.next_deadline())
        assert isinstance(withdrawn, Withdraw)


def test_a_peer_that_is_alone_at_its_stage_never_leaves_it():
    machine = mover()
    at_once(machine, SHORT, "confirming")
    (withdrawn,) = machine.handle(PlacementTick(), machine.next_deadline())
    assert withdrawn == Withdraw("not_confirmed")
    assert machine.phase == "resting"


def test_what_a_mate_knew_of_an_announcement_that_was_withdrawn_counts_for_nothing():
    machine = mover()
    now = at_once(machine, SHORT, "announced")
    machine.handle(GroupBeat(MATE, knows=True, stays=True), now)
    now = machine.next_deadline()
    machine.handle(PlacementTick(), now)
    (withdrawn,) = machine.handle(DirectoryQueried(View((5.0, 4.0, 5.0)), 1.0), now)
    assert isinstance(withdrawn, Withdraw)
    at_once(machine, SHORT, "confirming")  # And not gone, on the old answer.


def test_when_others_move_first_the_announcement_is_withdrawn():
    machine = mover()
    at_once(machine, SHORT, "announced")
    now = machine.next_deadline()
    machine.handle(PlacementTick(), now)
    (withdrawn,) = machine.handle(DirectoryQueried(View((5.0, 4.0, 5.0)), 1.0), now)
    assert isinstance(withdrawn, Withdraw)
    assert machine.next_deadline() > now + 10.0, "and it does not try again at once"


def looks(machine: Mover, *views: View) -> list[int]:
    """Which of these looks, one after another, made it announce a move."""
    announced = []
    for number, view in enumerate(views):
        now = machine.next_deadline()
        assert machine.handle(PlacementTick(), now) == [QueryDirectory()]
        if machine.handle(DirectoryQueried(view, 1.0), now):
            announced.append(number)
            machine.handle(PlacementTick(), machine.next_deadline())
            machine.handle(DirectoryQueried(None, 1.0), machine.next_deadline())  # It withdraws.
    return announced


def test_a_richest_stage_that_nobody_leaves_does_not_hold_up_the_others_for_ever():
    stuck = View((6.0, 3.0, 9.0))
    assert looks(mover(), *[stuck] * LOOKS_IN_VAIN) == []
    assert looks(mover(), *[stuck] * (LOOKS_IN_VAIN + 2)) == [LOOKS_IN_VAIN, LOOKS_IN_VAIN + 1]


def test_only_looks_in_a_row_count_at_which_nothing_else_was_in_the_way():
    stuck, even = View((6.0, 3.0, 9.0)), View((3.5, 3.0, 9.0))
    assert looks(mover(), *[stuck] * 2, even, *[stuck] * LOOKS_IN_VAIN) == []
    assert looks(mover(), *[even] * 9) == []


def test_nobody_waits_for_a_richer_stage_that_no_usual_peer_would_leave():
    def slow(richest: float) -> Intent | None:
        return choose_move(View((richest, 2.0, 2.4), usual=1.0), ME, 2, 0.2, EQUAL, 0.0, Random(1))

    assert slow(3.0) == Intent(ME, 2, 1, 0.2, 0.2), "one of them gone, theirs would be the poorest"
    assert slow(4.0) is None, "they have one to spare"


def test_of_the_stages_below_one_that_nobody_leaves_the_richest_is_the_first_to_be_left():
    stuck = View((6.0, 3.0, 9.0, 12.0))
    machine = Mover(ME, 0, MoveRules((1.0,) * 4), Random(1), 0.0, 10.0)
    assert looks(machine, *[stuck] * (2 * LOOKS_IN_VAIN + 1)) == [2 * LOOKS_IN_VAIN]


def test_a_cool_down_ends_early_for_a_stage_that_is_gone_and_for_nothing_else():
    machine = mover(rests_until=EQUAL.cool_down(60.0, moved=0))
    assert machine.next_deadline() >= 600.0
    machine.handle(Starving(), 100.0)
    earliest, latest = PATIENT_STARVING_SECONDS
    assert 100.0 + earliest <= machine.next_deadline() <= 100.0 + latest
    now = machine.next_deadline()
    assert machine.handle(PlacementTick(), now) == [QueryDirectory()]
    assert machine.handle(DirectoryQueried(SHORT, 1.0), now) == [], "only short of peers"
    now = machine.next_deadline()
    assert now < 600.0, "it looks all the same: a stage far away may lose its last peer"
    machine.handle(PlacementTick(), now)
    (announced,) = machine.handle(DirectoryQueried(View((5.0, 0.0, 5.0), peers=10, usual=1.0), 1.0), now)
    assert isinstance(announced, AnnounceMove)


def test_a_stage_that_stays_empty_is_looked_at_again_soon_by_whoever_did_not_go():
    machine = mover(rests_until=1000.0)
    machine.handle(Starving(), 100.0)
    now = machine.next_deadline()
    machine.handle(PlacementTick(), now)
    going = Intent(MATE, 0, 1, leaves=1.0, brings=1.0)
    alone_there = View((3.0, 0.0, 3.0), (going,), peers=7, usual=1.0)
    machine.handle(DirectoryQueried(alone_there, 1.0), now)
    earliest, latest = PATIENT_STARVING_SECONDS
    assert earliest <= machine.next_deadline() - now <= latest


def test_who_has_moved_often_stays_longer():
    pauses = [EQUAL.cool_down(20.0, moved) for moved in range(6)]
    assert pauses == [200.0, 400.0, 800.0, 1600.0, 1600.0, 1600.0]
    assert EQUAL.cool_down(0.1, 0) == 60.0


def test_a_stage_that_is_gone_is_looked_at_soon():
    machine = mover()
    machine.handle(PlacementTick(), machine.next_deadline())
    machine.handle(DirectoryQueried(View((5.0, 5.0, 5.0), peers=400), 1.0), 20.0)
    assert machine.next_deadline() > 200.0
    machine.handle(Starving(), 30.0)
    assert STARVING_SECONDS[0] <= machine.next_deadline() - 30.0 <= STARVING_SECONDS[1]
    first = machine.next_deadline()
    machine.handle(Starving(), 30.5)
    assert machine.next_deadline() <= max(first, 30.5 + STARVING_SECONDS[1])
    assert machine.handle(PlacementTick(), machine.next_deadline()) == [QueryDirectory()]


def test_a_directory_that_does_not_answer_moves_nobody():
    machine = mover()
    machine.handle(PlacementTick(), machine.next_deadline())
    assert machine.handle(DirectoryQueried(None, 1.0), 20.0) == []
    at_once(machine, SHORT, "announced")
    now = machine.next_deadline()
    machine.handle(PlacementTick(), now)
    (withdrawn,) = machine.handle(DirectoryQueried(None, 1.0), now)
    assert isinstance(withdrawn, Withdraw)


def test_the_work_of_a_stage_is_its_matrices_and_attention_to_half_of_the_sequence():
    manifest = Manifest("run", PeerId("owner"), 0, (2, 1, 1))
    model, tokens = manifest.model, manifest.data.seq_len
    products = []
    for stage, layers in enumerate(manifest.stages):
        shapes = parameter_shapes(model, manifest.span(stage)).items()
        matrices = sum(prod(sides) for name, sides in shapes if len(sides) > 1 and name != EMBEDDING)
        products.append(matrices + layers * 2 * (tokens / 2) * model.num_attention_heads * model.head_dim)
    assert stage_work(manifest) == pytest.approx([each / products[1] for each in products])
