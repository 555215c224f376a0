"""Plans of lines that lose packets: what a connection carries there, and what that costs."""

from dataclasses import replace

import pytest

from peers.lab.planner.losses import STREAMS, Streams, carries, of_both, repeated
from peers.lab.planner.plan import plan
from peers.lab.planner.plan_request import PlanRequest
from peers.lab.planner.speeds import MEGABIT, peer_classes
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, ModelShape, Rounds

HALF = 0.005
"""What each of two lines loses of a way that loses a hundredth."""
RUN = Manifest("run", PeerId("owner"), stages=(2, 2), model=ModelShape(hidden_size=512),
               data=Data(seq_len=256),
               rounds=Rounds(global_batch_tokens=10**7, max_seconds=3600.0))  # fmt: skip


def test_a_connection_carries_what_was_measured_of_bodies_both_ways():
    """29.2 to 31.3 bodies a second of 71,680 bytes, on nine links of one stream (docs/benchmarks/wan.md)."""
    assert 9 * carries(of_both(HALF, HALF), 0.05) / 71_680 == pytest.approx(30.5, rel=0.05)


def test_a_connection_is_faster_the_less_is_lost_and_the_nearer_it_goes():
    usual = carries(0.01, 0.05)
    assert usual == pytest.approx(2 * carries(0.04, 0.05))
    assert usual == pytest.approx(carries(0.0025, 0.1))
    assert carries(0.0, 0.05) == float("inf")


def test_what_is_sent_again_comes_a_round_trip_later_and_a_long_body_hardly_ever_comes_without():
    assert repeated(0.01, 0.05, 1000) == pytest.approx(0.01 * 0.05)
    assert 0.9 * 0.05 < repeated(0.01, 0.05, 1_000_000) < 0.05


def test_bodies_go_whole_over_the_stream_that_is_free_first():
    link = Streams(rate=1000.0, repeats=0.25)
    assert [link.through(0.0, 1000) for _ in range(STREAMS + 1)] == [1.25] * STREAMS + [2.25]
    assert link.through(50.0, 1000) == 51.25


def test_lossy_lines_cost_a_plan_little_with_many_under_way_and_much_with_few():
    def played(line: str, slots: int) -> float:
        question = PlanRequest(peer_classes(f"8x4ktps@{line}"), (0.025, 0.025), slots=slots)
        return plan(RUN, question).tokens_per_second

    few, many = played("100/10", 6), played("100/10", 64)
    assert played("100/10/0%", 6) == few
    assert played("100/10/0.5%", 6) < 0.8 * few
    assert played("100/10/0.5%", 64) > 0.9 * many


def test_the_loss_of_a_line_stands_behind_its_speeds():
    lossy, plain = peer_classes("8x2ktps@100/10/0.5%:24GB,8x2ktps@100/10:24GB")
    assert lossy.loss == HALF
    assert replace(lossy, loss=0.0) == plain
    assert lossy.up == 10 * MEGABIT
    for wrong in ("8x2ktps@100/10/12%", "8x2ktps@100/10/0.5", "8x2ktps/0.5%"):
        with pytest.raises(ValueError, match=r"cannot be predicted|no class"):
            peer_classes(wrong)
