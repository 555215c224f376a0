"""A stage with fewer peers than groups of experts leaves some untrained: newcomers go there first."""

from dataclasses import replace
from random import Random

import pytest

from swarmnet.identifiers import PeerId
from swarmnet.placement.policy import (
    MoveRules,
    ObservedPeer,
    View,
    choose_move,
    choose_stage,
    summarize_records,
)

TWO_GROUPS = MoveRules((1.0, 1.0, 1.0), groups=2)


def seen(*stages: int, rates: dict[int, float] | None = None) -> View:
    rates = rates or {}
    records = [(PeerId(str(n)), ObservedPeer(stage, rates.get(stage, 1.0))) for n, stage in enumerate(stages)]
    return summarize_records(records, TWO_GROUPS)


@pytest.mark.parametrize("seed", range(5))
def test_a_newcomer_takes_up_experts_that_nobody_trains_however_fast_who_is_there(seed):
    view = seen(0, 0, 1, 2, 2, rates={1: 9.0})
    assert choose_stage(view, TWO_GROUPS, Random(seed)) == 1
    assert choose_stage(view, replace(TWO_GROUPS, groups=1), Random(seed)) in (0, 2)


def test_a_stage_that_has_nobody_comes_before_one_that_lacks_half():
    assert choose_stage(seen(0, 0, 1), TWO_GROUPS, Random(0)) == 2


def test_where_each_group_has_somebody_the_least_capacity_decides():
    view = seen(0, 0, 1, 1, 2, 2, rates={2: 0.5})
    assert choose_stage(view, TWO_GROUPS, Random(0)) == 2


def test_nobody_leaves_a_stage_whose_experts_would_have_nobody_then():
    crowded, just_enough = seen(0, 1, 1, 1, 1, 2, 2), seen(0, 1, 1, 2, 2, rates={1: 4.0})
    assert choose_move(crowded, PeerId("1"), 1, 1.0, TWO_GROUPS, 0.0, Random(0)) is not None
    for_lack = choose_move(just_enough, PeerId("1"), 1, 4.0, TWO_GROUPS, 0.0, Random(0))
    assert for_lack is None
    assert choose_move(just_enough, PeerId("1"), 1, 4.0, replace(TWO_GROUPS, groups=1), 0.0, Random(0))
