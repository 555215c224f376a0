"""What is usual in size, who decides it, and what is done with numbers that are far from it."""

from __future__ import annotations

from itertools import pairwise
from math import exp, inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.model.norm_tracker import (
    ALONE_LIMIT,
    FEW,
    KEPT_OF_EACH,
    LIMIT,
    MAX_NORM,
    MAX_PEERS,
    RECENT,
    RECENT_OF_EACH,
    USUAL_WEIGHT,
    NormCheck,
    NormTracker,
)

HONEST = (PeerId("c"), PeerId("d"))
BAD, ONLY = PeerId("bad"), PeerId("only")
SCATTER = 0.25
"""Of the logarithms of honest norms: as measured of gradients of microbatches of 32 tokens."""


def play(chance: Random, norms: list[float], sizes: NormTracker) -> dict[PeerId, list[NormCheck]]:
    """Two honest peers and one that sends these, in an order drawn each time; usual is 5."""
    judged: dict[PeerId, list[NormCheck]] = {peer: [] for peer in (*HONEST, BAD)}
    for norm in norms:
        for peer in chance.sample((*HONEST, BAD), 3):
            sent = norm if peer == BAD else 5.0 * exp(chance.gauss(0.0, SCATTER))
            judged[peer].append(sizes.judge(peer, sent))
    return judged


@given(st.integers(0, 1 << 32), st.lists(st.floats(0.0, 1e30), min_size=60, max_size=60))
def test_whatever_one_of_three_sends_the_others_count_almost_whole_and_it_counts_no_more(seed, norms):
    sizes = NormTracker(weighed=True)
    judged = play(Random(seed), norms, sizes)
    for peer in HONEST:
        assert not any(judgement.outlier for judgement in judged[peer])
        assert sum(judgement.gain < 0.5 for judgement in judged[peer]) <= 3
    counted = [j.gain * min(j.ratio, MAX_NORM) for j in judged[BAD][FEW:] if j.gain]
    assert sum(counted) <= 2.0 * KEPT_OF_EACH + USUAL_WEIGHT * LIMIT * len(counted)
    assert max(counted, default=0.0) <= LIMIT * 1.001


@pytest.mark.parametrize("factor", [1000.0, 1e12, 10.0, 0.0, 0.1])
def test_who_is_always_far_off_is_soon_found_out_of_line(factor):
    judged = play(Random(1), [5.0 * factor] * 12, NormTracker())
    assert next(i for i, judgement in enumerate(judged[BAD]) if judgement.outlier) <= 2 * FEW


def test_loud_and_silent_in_turn_gives_no_more_weight_than_the_others_have():
    norms = [5.0 * (0.01 if number % 16 < 9 else 2.9) for number in range(320)]
    judged = play(Random(2), norms, NormTracker(weighed=True))
    weights = [judgement.gain * judgement.ratio for judgement in judged[BAD]]
    assert sum(weights) / len(weights) < USUAL_WEIGHT


def test_what_changes_for_all_at_once_puts_nobody_out_of_line_and_is_usual_soon():
    chance, sizes = Random(3), NormTracker()
    play(chance, [5.0] * 40, sizes)
    for level in (50.0, 5000.0, 0.5):
        judged = [sizes.judge(peer, level) for _ in range(12) for peer in (*HONEST, BAD)]
        assert not any(judgement.outlier for judgement in judged)
        assert not judged[-1].far_off
        assert judged[-1].gain == 1.0


def test_honest_norms_are_hardly_ever_scaled_and_none_is_refused():
    sizes = NormTracker(weighed=True)
    chance = Random(4)
    honest = [5.0 * exp(chance.gauss(0.0, SCATTER)) for _ in range(1000)]
    judged = [judgement for given in play(chance, honest, sizes).values() for judgement in given]
    assert not any(judgement.outlier or judgement.far_off for judgement in judged)
    assert sum(judgement.gain < 1.0 for judgement in judged) < len(judged) / 50


def test_a_peer_without_others_beside_it_grows_step_by_step_and_is_blamed_for_nothing():
    sizes, counted = NormTracker(), []
    for norm in [5.0] * 20 + [5e9] * 20:
        judgement = sizes.judge(ONLY, norm)
        counted.append(norm * judgement.gain)
        assert not judgement.outlier
        assert not judgement.far_off
    assert all(after <= ALONE_LIMIT * 1.001 * before for before, after in pairwise(counted))
    assert counted[-1] <= ALONE_LIMIT * 5.0 * LIMIT**19 * 1.001


def test_of_two_peers_the_one_that_stays_as_it_was_is_usual():
    sizes = NormTracker()
    first, second = HONEST
    for _ in range(60):
        sizes.judge(first, 5.0)
    for _ in range(60):
        assert sizes.judge(second, 5e6).far_off
        assert sizes.judge(first, 5.0) == NormCheck(pytest.approx(1.0, rel=0.5), 1.0)
        assert sizes.judge(second, 5e-6).far_off


@pytest.mark.parametrize("norm", [inf, nan, 2 * MAX_NORM])
@pytest.mark.parametrize("before", [0, 20])
def test_what_cannot_be_squared_and_summed_is_left_out_from_the_first(norm, before):
    sizes = NormTracker()
    play(Random(5), [5.0] * before, sizes)
    assert sizes.judge(BAD, norm).gain == 0.0
    assert sizes.judge(BAD, norm).far_off


def test_numbers_that_are_all_zero_are_as_usual_as_any():
    sizes = NormTracker(weighed=True)
    for _ in range(20):
        for peer in HONEST:
            assert sizes.judge(peer, 0.0) == NormCheck(1.0, 1.0)


def test_norms_of_another_kind_are_not_compared():
    sizes = NormTracker()
    for _ in range(20):
        for peer in HONEST:
            assert not sizes.judge(peer, 5.0, (1, 3)).far_off
            assert not sizes.judge(peer, 500.0, (2, 3)).far_off


def test_peers_without_end_are_not_remembered():
    sizes = NormTracker()
    for number in range(2 * MAX_PEERS):
        sizes.judge(PeerId(f"peer {number}"), 5.0)
    assert len(sizes._ratios) == MAX_PEERS
    assert len(sizes._recent[None]) == RECENT
    assert RECENT_OF_EACH < RECENT


def test_who_stays_when_the_others_have_left_is_judged_by_itself():
    sizes, (gone, other) = NormTracker(), HONEST
    for _ in range(RECENT):
        for peer in (gone, other, ONLY):
            sizes.judge(peer, 5.0)
    assert sizes.judge(ONLY, 25.0).far_off, "beside what the others send"
    sizes.left(gone)
    sizes.left(other)
    assert not any(sizes.judge(ONLY, 25.0).far_off for _ in range(RECENT))
    sizes.left(ONLY)
    huge = sizes.judge(BAD, 1e6)
    assert huge.gain * huge.ratio <= ALONE_LIMIT * 1.001, "what was usual is not forgotten with who sent it"
