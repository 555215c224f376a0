"""The weakest stage on the page does not jump between stages that are alike."""

from peers.stageless.observer.steady_stage import STEADY_SECONDS, SteadyStage
from peers.telemetry.snapshot import StageRow, SwarmSnapshot


def of(at, weakest, peers=(2, 2)):
    rows = tuple(StageRow(stage, 1, count, {}, 1.0) for stage, count in enumerate(peers))
    return SwarmSnapshot("", at, stages=rows, weakest=weakest)


def shown(*snapshots):
    steady = SteadyStage()
    return [steady.steady(snapshot).weakest for snapshot in snapshots]


def test_two_stages_that_alternate_do_not_make_the_page_jump():
    assert shown(*(of(float(second), second % 2) for second in range(120))) == [0] * 120


def test_another_stage_is_shown_once_it_has_been_weaker_for_a_while():
    seconds = [0.0, 5.0, 5.0 + STEADY_SECONDS - 1, 5.0 + STEADY_SECONDS]
    assert shown(of(seconds[0], 0), *(of(at, 1) for at in seconds[1:])) == [0, 0, 0, 1]


def test_a_stage_that_lost_a_peer_is_shown_at_once():
    assert shown(of(0.0, 0), of(1.0, 1, peers=(2, 1))) == [0, 1]


def test_nothing_is_shown_while_a_stage_is_stuck_or_nobody_is_there():
    assert shown(of(0.0, 0), of(1.0, None), of(2.0, 1)) == [0, None, 1]
