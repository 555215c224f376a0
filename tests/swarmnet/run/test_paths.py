"""Legal paths: what the rules allow is exactly what a walk over all paths finds, and a lie is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.run.path_rules import (
    LONGEST_JUMP,
    IllegalPath,
    PathHeader,
    PathRules,
    begin,
    check,
    choices,
    count_continuations,
    shorten,
    visit,
)

rules_drawn = st.builds(
    lambda stages, skipped: PathRules(stages, min(skipped, stages - 2)), st.integers(2, 9), st.integers(0, 5)
)  # fmt: skip


def is_legal(path, rules):
    """The constraints as SkipPipe's text gives them, on a whole path that never goes back."""
    return (
        path[0] == 0
        and path[-1] == rules.last
        and all(0 < following - stage <= LONGEST_JUMP for stage, following in pairwise(path))
        and rules.stages - rules.most_skipped <= len(path)
    )


def all_paths(stages):
    """Every sequence of different stages from the first to the last."""

    def extend(path):
        if path[-1] == stages - 1:
            yield path
            return
        for stage in range(1, stages):
            if stage not in path:
                yield from extend((*path, stage))

    return list(extend((0,)))


def walked(rules):
    """Every path that the rules let through, stage by stage."""

    def extend(header):
        if not header.hops_left:
            yield header.visited
        for stage in choices(header, rules):
            yield from extend(visit(header, stage, rules))

    for length in range(rules.shortest, rules.stages + 1):
        yield from extend(begin(rules, length))


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("skipped", [0, 1, 2, 4])
def test_choices_lead_to_every_legal_path_and_to_no_other(stages, skipped):
    rules = PathRules(stages, min(skipped, stages - 2))
    found = sorted(walked(rules))
    assert found == sorted(path for path in all_paths(stages) if is_legal(path, rules))


@given(rules_drawn, st.data())
def test_no_sequence_of_choices_ends_nowhere_or_breaks_a_constraint(rules, data):
    header = begin(rules, data.draw(st.integers(rules.shortest, rules.stages)))
    while header.hops_left:
        shorter = shorten(header, rules)
        if shorter is not None and data.draw(st.booleans()):
            header = shorter
        following = choices(header, rules)
        assert following, f"nowhere to go from {header}"
        header = visit(header, data.draw(st.sampled_from(following)), rules)
        check(header, header.stage, rules)
    assert is_legal(header.visited, rules)


visited_drawn = st.lists(st.integers(-1, 9), max_size=10) | st.sets(st.integers(0, 9)).map(sorted)


@given(rules_drawn, visited_drawn, st.integers(-1, 9), st.integers(0, 9))
def test_a_header_passes_only_if_honest_peers_could_have_made_it(rules, visited, hops, stage):
    header = PathHeader(tuple(visited), hops)
    try:
        check(header, stage, rules)
    except IllegalPath:
        return
    assert header.stage == stage == max(visited)
    prefixes = {path[: len(visited)] for path in walked(rules) if len(path) == len(visited) + hops}
    assert header.visited in prefixes


@given(rules_drawn, st.data())
def test_a_true_header_with_one_field_changed_is_refused(rules, data):
    header = begin(rules)
    for _ in range(data.draw(st.integers(1, max(1, rules.shortest - 1)))):
        header = visit(header, data.draw(st.sampled_from(choices(header, rules))), rules)
    stage = header.stage
    for changed in (
        PathHeader(header.visited, header.hops_left - 1),
        PathHeader(header.visited[1:], header.hops_left),
        PathHeader((*header.visited, stage), header.hops_left),
        PathHeader((*header.visited[:-1], rules.stages, stage), header.hops_left),
    ):
        with pytest.raises(IllegalPath):
            check(changed, stage, rules)
    with pytest.raises(IllegalPath):
        check(header, stage - 1, rules)


@pytest.mark.parametrize("rules", [PathRules(6, 2), PathRules(4, 1), PathRules(6, 3), PathRules(3)])
def test_ways_ahead_are_counted_as_there_are(rules):
    for path in walked(rules):
        header, as_long = begin(rules, len(path)), [way for way in walked(rules) if len(way) == len(path)]
        for stage in path[1:-1]:
            header = visit(header, stage, rules)
            ahead = [way for way in as_long if way[: len(header.visited)] == header.visited]
            assert count_continuations(header, rules) == len(ahead)


def test_the_ratio_is_of_all_stages_and_spares_the_first_and_the_last():
    assert PathRules.of(6, 1 / 3) == PathRules(6, 2)
    assert PathRules.of(3, 0.9) == PathRules(3, 1)
    assert PathRules.of(2, 0.9) == PathRules(2, 0)
    assert not PathRules.of(6, 0.0).skips


@pytest.mark.parametrize(
    ("rules", "scales"),
    [
        (PathRules(6), {6: 1.0}),
        (PathRules(6, 2), {4: 1.0, 5: 2 / 3, 6: 1 / 2}),
        (PathRules(3, 1), {2: 1.0, 3: 0.0}),
        (PathRules(1), {1: 1.0}),
        (PathRules(2), {2: 1.0}),
    ],
)
def test_middle_stages_add_as_much_together_however_many_there_are(rules, scales):
    assert {visited: rules.branch_scale(1, visited) for visited in scales} == scales
    assert {rules.branch_scale(stage, visited) for visited in scales for stage in (0, rules.last)} == {1.0}


def test_a_run_begins_whole_for_as_many_rounds_as_it_says():
    rules = PathRules.of(6, 1 / 3, full_path_warmup_rounds=3)
    assert [rules.length(round, 7) for round in range(5)] == [6, 6, 6, 4, 4]
    assert rules.skips, "questions run ahead from the first round on"
    assert PathRules.of(6, 1 / 3).length(0, 0) == 4
    assert PathRules(6).length(0, 0) == PathRules(6).length(10**6, 10**6) == 6


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9])
def test_a_share_of_the_microbatches_is_whole_and_they_lie_evenly(share):
    rules = PathRules.of(6, 1 / 3, full_path_warmup_rounds=2, full_path_fraction=share)
    lengths = [rules.length(2, begun) for begun in range(1000)]
    for first in (0, 300, 990):
        part = lengths[first : first + 300]
        assert abs(part.count(6) - share * len(part)) <= 1.0 + 1e-6
    assert set(lengths) <= {4, 6}
    assert rules.length(1, 0) == 6
    assert rules.mean_length(1) == 6.0
    assert rules.mean_length(2) == pytest.approx(sum(lengths) / 1000, abs=0.01)
    assert rules.visit_share(3, 2) == pytest.approx(0.5 + 0.5 * share)


def test_a_jump_bounds_how_much_a_long_model_may_leave_out():
    rules = PathRules.of(24, 0.95)
    assert all(b - a <= LONGEST_JUMP for path in [next(walked(rules))] for a, b in pairwise(path))
    assert rules.shortest == 7


@pytest.mark.parametrize("length", [0, 3, 7])
def test_a_path_is_neither_shorter_nor_longer_than_allowed(length):
    with pytest.raises(IllegalPath, match="4 to 6"):
        begin(PathRules.of(6, 1 / 3), length)
