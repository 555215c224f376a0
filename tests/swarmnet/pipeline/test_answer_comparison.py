"""Comparisons of answers on hand-set likenesses: who is asked, who is judged, and who is avoided."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import log
from random import Random

import pytest
import torch

from swarmnet.identifiers import PeerId
from swarmnet.pipeline.answer_comparison import (
    AGREEMENTS,
    GRADIENT,
    HIDDEN,
    LOCAL_STEPS_GRADIENT,
    PEERS_ASKED,
    AnswerTrust,
    Comparison,
    Judgement,
    Likeness,
    Limits,
    likeness,
    odd_one_out,
)

A, B, C, D, E, BELOW, BELOW2 = (PeerId(name) for name in ("a", "b", "c", "d", "e", "below", "below2"))
SAME, OTHER = b"same", b"other"
ALIKE, UNLIKE = Likeness(0.99, 1.01), Likeness(-0.99, 1.01)


def compared(unlike: set[PeerId], digests: dict[PeerId, bytes], **fields: object) -> Comparison:
    """A comparison in which the peers of `unlike` differ from all others."""
    comparison = Comparison(A, BELOW, digests, GRADIENT, **fields)
    for pair in combinations(digests, 2):
        comparison.likenesses[frozenset(pair)] = UNLIKE if set(pair) & unlike else ALIKE
    return comparison


def test_likeness_sees_direction_and_size_and_survives_zeros_and_large_numbers():
    first = torch.randn(20, generator=torch.Generator().manual_seed(0))
    assert likeness(first, 2 * first) == Likeness(pytest.approx(1.0), pytest.approx(2.0))
    assert likeness(first, -first).cosine == pytest.approx(-1.0)
    assert likeness(1e18 * first, 1e18 * first).cosine == pytest.approx(1.0)
    assert not GRADIENT.agree(likeness(first, torch.zeros(20)))
    assert GRADIENT.agree(likeness(torch.zeros(20), torch.zeros(20)))
    assert not HIDDEN.agree(likeness(first, torch.full((20,), torch.nan)))


def test_two_that_agree_end_a_comparison_and_two_that_differ_need_a_third():
    assert compared(set(), {A: SAME}).judge() is None
    assert compared(set(), {A: SAME, B: SAME}).judge() == Judgement("agreed", (A, B))
    assert compared({A}, {A: SAME, B: SAME}).judge() is None
    assert compared({A}, {A: SAME, B: SAME}).judge(is_last=True) == Judgement("undecided")
    assert compared({A}, {A: SAME, B: SAME, C: SAME}).judge() == Judgement("differed", (B, C), A, (B, C))
    assert compared({B}, {A: SAME, B: SAME, C: SAME}).judge() == Judgement("differed", (A, C), B, (A, C))
    assert compared({A, B}, {A: SAME, B: SAME, C: SAME}).judge() == Judgement("undecided")


def test_hidden_states_that_differ_need_a_third_peer_for_the_one_below():
    assert compared(set(), {A: SAME, B: SAME}, hidden_differ=True).judge() is None
    assert compared(set(), {A: SAME, B: SAME}, hidden_differ=True).judge(is_last=True) is not None
    three = compared(set(), {A: SAME, B: SAME, C: SAME}, hidden_differ=True)
    assert three.judge() == Judgement("agreed", (A, B, C))


BY_BELOW = Judgement("differed", (), A, (BELOW,))


def test_one_peer_below_that_sends_two_gradients_does_not_make_the_first_peer_avoided():
    assert compared({A}, {A: OTHER, B: SAME, C: SAME}).judge() == BY_BELOW
    assert compared({B}, {A: SAME, B: OTHER, C: SAME}).judge() == Judgement("undecided")
    trust = AnswerTrust()
    assert not any(trust.differed(A, [BELOW], group=3) for _ in range(10)), "one peer below may lie"
    assert trust.differed(A, [BELOW2], group=3)


def test_a_peer_is_asked_once_and_never_the_first_and_some_below_know_nothing():
    comparison = Comparison(A, BELOW, {A: SAME}, GRADIENT)
    asked = [comparison.ask([A, B, C], Random(0), 1.0) for _ in range(3)]
    assert set(asked) == {B, C, None}
    many = Comparison(A, BELOW, {A: SAME}, GRADIENT)
    asked = [many.ask([PeerId(str(number)) for number in range(9)], Random(0), 1.0) for _ in range(9)]
    assert sum(peer is not None for peer in asked) == PEERS_ASKED
    comparison.unknown = 1
    assert comparison.judge(is_last=True) == Judgement("unanswered")
    comparison.unknown = 2
    assert comparison.judge() == BY_BELOW


def test_of_fewer_than_three_none_is_odd():
    assert odd_one_out([A, B], lambda one, other: False) is None
    assert odd_one_out([A, B, C], lambda one, other: A not in (one, other)) == A
    assert odd_one_out([A, B, C], lambda one, other: False) is None
    assert odd_one_out([A, B, C, D], lambda one, other: D not in (one, other)) == D


def test_a_peer_that_always_differs_is_avoided_at_the_second_comparison_and_earns_its_trust_back():
    trust = AnswerTrust()
    assert not trust.differed(A, [B, C], group=3)
    assert trust.differed(A, [B, C], group=3)
    assert trust.differed(A, [B, C], group=3), "on probation once is enough"
    earned = [trust.agreed(A, [A, B]) for _ in range(AGREEMENTS)]
    assert earned == [False] * (AGREEMENTS - 1) + [True]
    assert not trust.differed(A, [B, C], group=3), "trusted as before"
    trust.agreed(A, [B])
    trust.agreed(A, [B])
    assert not trust.differed(A, [B, C], group=3), "one fault in three"


def test_two_that_conspire_cannot_accuse_a_peer_of_a_group_of_five():
    trust = AnswerTrust()
    assert not any(trust.differed(A, [B, C], group=5) for _ in range(20))
    assert trust.differed(A, [B, D], group=5)


LARGEST = {GRADIENT: 0.121, LOCAL_STEPS_GRADIENT: 0.258 / 1.25**2, HIDDEN: 0.038 / 1.25**2}
"""Largest difference of an honest cosine from 1 in about 800 comparisons (docs/benchmarks/attacks.md). With
local steps, and for hidden states, it was measured at 1.25 times `MEASURED_STEP`."""


@pytest.mark.parametrize("limits", LARGEST)
@pytest.mark.parametrize("comparisons", [5_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_no_honest_peer_is_avoided_where_answers_differ_twice_as_much_as_was_measured(limits, comparisons):
    """Differences fall off exponentially, so that one of 800 is twice the largest that was measured. Each
    peer is unlike all others by its own part of them."""
    chance, group = Random(0), [PeerId(str(number)) for number in range(6)]
    mean, trust, thirds, verdicts = 2 * LARGEST[limits] / log(800), AnswerTrust(), 0, Counter()
    for _ in range(comparisons):
        comparison = Comparison(A, BELOW, {}, limits)
        own: dict[PeerId, float] = {}
        for peer in chance.sample(group, 3):
            own[peer] = chance.expovariate(2 / mean)
            for other in comparison.digests:
                like = Likeness(1.0 - own[peer] - own[other], 1.0)
                comparison.likenesses[frozenset((peer, other))] = like
            comparison.digests[peer] = SAME
            if judgement := comparison.judge():
                break
        thirds += len(comparison.digests) == 3
        verdicts[judgement.verdict] += 1
        for peer in judgement.agreed:
            trust.agreed(peer, judgement.agreed)
        if judgement.odd is not None:
            assert not trust.differed(judgement.odd, judgement.accusers, len(group))
    assert verdicts["agreed"] > 0.999 * comparisons
    if comparisons == 100_000 and limits is not LOCAL_STEPS_GRADIENT:  # Its limits are the widest.
        assert thirds > 0, "some honest answers differ by chance, and a third peer decides"


def test_a_higher_learning_rate_lets_honest_answers_differ_more():
    assert GRADIENT.at_step(1.0) == GRADIENT == GRADIENT.at_step(0.1)
    assert GRADIENT.at_step(2.0) == Limits(pytest.approx(0.2), pytest.approx(2.25))
    assert HIDDEN.at_step(1000.0).agree(Likeness(-0.99, 100.0))
