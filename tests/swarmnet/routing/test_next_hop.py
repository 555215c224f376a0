"""A peer's headers: checked when they come, passed on with each way, and dead stages gone around."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.next_hop import Passage, Straight
from swarmnet.routing.skipping import Skipping
from swarmnet.run.path_rules import IllegalPath, PathHeader, PathRules, begin, check, choices, visit

KEY = MicrobatchId(PeerId("origin"), 1)
RULES = PathRules.of(6, 1 / 3)


def swarm(*dead):
    """Two live peers per stage, but for the dead ones."""
    return lambda stage: [] if stage in dead else [PeerId(f"{stage}a"), PeerId(f"{stage}b")]


@pytest.mark.parametrize("kind", [Straight, Skipping])
def test_without_skipping_the_next_stage_is_the_only_way(kind):
    ways = kind(rules=PathRules(4), stage=0, live=swarm())
    ways.start(KEY)
    assert ways.candidates(KEY) == ["1a", "1b"] == ways.candidates(None)
    assert ways.header_for(KEY, 1) == PathHeader((0, 1), 2)


@given(data=st.data(), stages=st.integers(2, 6))
def test_a_run_that_skips_nothing_needs_no_legality(data, stages):
    """`Straight` answers as `Skipping` does under rules that leave nothing out."""
    stage = data.draw(st.integers(0, stages - 1))
    names = [data.draw(st.sets(st.sampled_from("abc"))) for _ in range(stages)]
    peers = [[PeerId(f"{number}{name}") for name in sorted(those)] for number, those in enumerate(names)]
    tried = data.draw(st.sets(st.sampled_from([PeerId(f"{stage + 1}{name}") for name in "abc"])))
    rules, live = PathRules(stages), lambda stage: peers[stage] if stage < stages else []
    straight, skipping = Straight(rules, stage, live), Skipping(rules=rules, stage=stage, live=live)
    header = PathHeader(tuple(range(stage + 1)), stages - 1 - stage)
    straight.check(header)
    skipping.check(header)
    assert straight.arrive(KEY, header) == skipping.arrive(KEY, header)
    if stage < stages - 1:
        if peers[stage + 1]:
            assert straight.header_for(KEY, stage + 1) == skipping.header_for(KEY, stage + 1)
        for asked in ((KEY, tried), (None, ())):
            assert list(straight.candidates(*asked)) == skipping.candidates(*asked)
    assert straight.missing() == skipping.missing()
    assert straight.came_by_other_path(KEY, header) == skipping.came_by_other_path(KEY, header)


VISITED = st.lists(st.integers(-1, 5), max_size=5).map(tuple)


@given(header=st.builds(PathHeader, VISITED, st.integers(-1, 5)))
def test_only_one_header_leads_straight_to_a_stage(header):
    if header == PathHeader((0, 1, 2), 1):
        return
    with pytest.raises(IllegalPath):
        Straight(PathRules(4), 2, swarm()).check(header)


def test_a_microbatch_may_go_where_its_path_can_be_completed():
    ways = Skipping(rules=RULES, stage=0, live=swarm())
    ways.start(KEY)
    assert {peer[0] for peer in ways.candidates(KEY)} == {"1", "2", "3"}
    check(ways.header_for(KEY, 3), 3, RULES)


def test_the_round_says_how_long_the_way_of_a_microbatch_is_that_starts_now():
    round = 9
    ways = Skipping(rules=PathRules.of(6, 1 / 3, full_path_warmup_rounds=10), stage=0, live=swarm())
    ways.round = lambda: round
    ways.start(KEY)
    assert ways.candidates(KEY) == ["1a", "1b"] == ways.candidates(None)
    round = 10
    assert {peer[0] for peer in ways.candidates(None)} == {"1", "2", "3"}
    assert ways.candidates(KEY) == ["1a", "1b"], "what was begun is done as it was begun"


def test_every_second_microbatch_may_be_whole():
    ways = Skipping(rules=PathRules.of(6, 1 / 3, full_path_fraction=0.5), stage=0, live=swarm())
    lengths = []
    for counter in range(6):
        told = {peer[0] for peer in ways.candidates(None)}
        key = MicrobatchId(PeerId("origin"), counter)
        ways.start(key)
        assert told == {peer[0] for peer in ways.candidates(key)}, "room is looked for where it will go"
        lengths.append(ways.headers[key].length)
    assert lengths == [4, 6, 4, 6, 4, 6]


def test_a_dead_stage_is_gone_around_while_a_run_begins_whole():
    ways = Skipping(rules=PathRules.of(6, 1 / 3, full_path_warmup_rounds=10), stage=0, live=swarm(1))
    ways.start(KEY)
    assert ways.candidates(KEY) == ["2a", "2b"]
    assert ways.header_for(KEY, 2) == PathHeader((0, 2), 3)
    assert ways.missing() == ()
    ways.live = swarm(1, 2, 3)
    assert ways.missing() == (1, 2, 3)


def test_a_middle_stage_counts_for_less_the_more_of_them_are_on_the_way():
    middle, last = Skipping(rules=RULES, stage=2, live=swarm()), Skipping(rules=RULES, stage=5, live=swarm())
    for hops_left, scale in ((2, 1.0), (3, 2 / 3), (4, 0.5)):
        assert middle.arrive(KEY, PathHeader((0, 2), hops_left)) == Passage(2 + hops_left, scale)
    assert last.arrive(KEY, PathHeader((0, 1, 2, 3, 4, 5), 0)) == Passage(6, 1.0)


def test_a_dead_stage_is_gone_around():
    ways = Skipping(rules=RULES, stage=0, live=swarm(1, 3))
    ways.start(KEY)
    assert {peer[0] for peer in ways.candidates(KEY)} == {"2"}
    assert ways.missing() == ()


def test_beyond_the_budget_the_missing_stages_are_named():
    ways = Skipping(rules=RULES, stage=0, live=swarm(1, 2, 3))
    ways.start(KEY)
    assert ways.candidates(KEY) == []
    assert ways.missing() == (1, 2, 3)
    assert Skipping(rules=RULES, stage=2, live=swarm(5)).missing() == (5,)
    assert Skipping(rules=RULES, stage=5, live=swarm(1, 2, 3)).missing() == ()


def test_a_full_path_leaves_stages_out_only_when_they_are_dead():
    dead = set()
    ways = Skipping(rules=RULES, stage=1, live=lambda stage: [] if stage in dead else [PeerId(str(stage))])
    ways.arrive(KEY, PathHeader((0, 1), 4))
    assert ways.candidates(KEY) == ["2"]
    dead.add(2)
    assert ways.candidates(KEY) == ["3"]
    assert ways.header_for(KEY, 3).hops_left == 2


@pytest.mark.parametrize(
    "header",
    [
        PathHeader((0, 2), 2),  # for stage 2, not for this one
        PathHeader((0, 1), 1),  # too short
        PathHeader((0, 3, 1), 1),  # it goes back
        PathHeader((), 3),
    ],
)
def test_an_illegal_header_is_refused(header):
    with pytest.raises(IllegalPath):
        Skipping(rules=RULES, stage=1, live=swarm()).check(header)


def test_the_same_microbatch_by_another_way_is_told_apart():
    ways = Skipping(rules=RULES, stage=3, live=swarm())
    ways.arrive(KEY, PathHeader((0, 1, 3), 1))
    assert not ways.came_by_other_path(KEY, PathHeader((0, 1, 3), 1))
    assert ways.came_by_other_path(KEY, PathHeader((0, 2, 3), 1))
    ways.forget(KEY)
    assert not ways.came_by_other_path(KEY, PathHeader((0, 2, 3), 1))


def test_another_try_stays_in_the_stage_while_it_has_other_peers():
    ways = Skipping(rules=RULES, stage=0, live=swarm())
    ways.start(KEY)
    everybody = ways.candidates(KEY)
    assert ways.candidates(KEY, tried={PeerId("2a")}) == everybody, "it was sent nowhere yet"
    ways.header_for(KEY, 2)
    assert ways.candidates(KEY) == everybody
    assert ways.candidates(KEY, tried={PeerId("2a")}) == ["2b"]
    assert ways.candidates(KEY, tried={PeerId("2a"), PeerId("2b")}) == everybody


def test_a_peer_takes_stages_that_it_cannot_see_for_live():
    ways = Skipping(
        rules=PathRules(9), stage=2, live=lambda stage: [PeerId(str(stage))] if stage in (1, 3) else []
    )
    ways.arrive(KEY, PathHeader((0, 1, 2), 6))
    assert ways.candidates(KEY) == ["3"]
    assert ways.missing() == ()
    assert Skipping(rules=PathRules(9), stage=3, live=lambda stage: []).missing() == (4,)


@pytest.mark.parametrize(("skipped", "reach"), [(0, 1), (2, 3), (5, 4)])
def test_neighbours_on_a_path_are_never_further_apart_than_the_reach(skipped, reach):
    rules = PathRules(8, skipped)
    assert rules.reach == reach
    pending, furthest = [begin(rules, length) for length in range(rules.shortest, 9)], 0
    while pending:
        header = pending.pop()
        for stage in choices(header, rules):
            furthest = max(furthest, stage - header.stage)
            pending.append(visit(header, stage, rules))
    assert furthest <= reach
