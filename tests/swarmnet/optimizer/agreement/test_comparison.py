"""Who agrees with whom in one round: hostile votes, and integers that depend on the votes alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from method_cases import correlated_votes

from swarmnet.optimizer.agreement.comparison import (
    FULL_RATIO,
    FULL_WEIGHT,
    RATIO,
    ZERO_RATIO,
    base_weights,
    compare,
)
from swarmnet.rounds.open_round import MIN_CONTRIBUTORS

NUMBERS = 4096


def found(signs_CN, bases=None, known=None, is_private=False):
    contributors = len(signs_CN)
    bases_C = np.full(contributors, FULL_WEIGHT) if bases is None else np.array(bases)
    known_C = np.ones(contributors, bool) if known is None else np.array(known)
    return compare(signs_CN, bases_C, known_C, is_private=is_private)


def lies(kind, count, honest_CN, right_N):
    generator = np.random.default_rng(7)
    numbers = len(right_N)
    common_N = generator.choice(np.array([-1, 1], np.int8), numbers)
    match kind:
        case "flip":
            their_CN, their_right_N = correlated_votes(count, numbers, seed=3)
            return -their_CN * their_right_N * right_N
        case "opposite":
            return -honest_CN[:count]
        case "noise":
            return generator.choice(np.array([-1, 1], np.int8), (count, numbers))
        case "zero":
            return np.ones((count, numbers), np.int8)
        case "collude":
            return np.tile(common_N, (count, 1))
        case "copy":
            return np.tile(honest_CN[0], (count, 1))


@pytest.mark.parametrize("kind", ["flip", "opposite", "noise", "zero", "collude"])
@pytest.mark.parametrize("count", [1, 4, 6])
def test_liars_lose_their_weight_and_honest_peers_keep_theirs(kind, count):
    honest_CN, right_N = correlated_votes(16 - count)
    result = found(np.concatenate([honest_CN, lies(kind, count, honest_CN, right_N)]))
    weights = base_weights(result.ratios)
    assert (weights[:-count] == FULL_WEIGHT).all()
    assert (weights[-count:] == 0).all()
    assert (result.shared[:-count] == FULL_WEIGHT).all()


@pytest.mark.parametrize("count", [3, 4, 6])
def test_liars_as_alike_as_honest_peers_lose_their_weight(count):
    """Correlations of 0.12 among honest peers, as late in training, and of 0.25 among liars that err around
    a common wrong direction. In a private run, they may be an owner's peers."""
    open_RC, private_RC = np.zeros((2, 12, 16), int)
    for round in range(12):
        honest_CN, _ = correlated_votes(16 - count, 10_000, errors=0.325, seed=round)
        lies_CN, _ = correlated_votes(count, 10_000, errors=0.25, seed=100 + round)
        signs_CN = np.concatenate([honest_CN, lies_CN])
        open_RC[round] = found(signs_CN).ratios
        private_RC[round] = found(signs_CN, is_private=True).ratios
    expected = [FULL_WEIGHT] * (16 - count) + [0] * count
    assert (base_weights(open_RC.mean(0).astype(int)) == expected).all()
    assert (private_RC[:, 16 - count :] > open_RC[:, 16 - count :]).all()


def test_copies_and_the_copied_share_one_vote():
    honest_CN, right_N = correlated_votes(12)
    result = found(np.concatenate([honest_CN, lies("copy", 4, honest_CN, right_N)]))
    assert (base_weights(result.ratios) == FULL_WEIGHT).all()
    assert (result.shared == [5 * FULL_WEIGHT, *[FULL_WEIGHT] * 11, *[5 * FULL_WEIGHT] * 4]).all()


def test_newcomers_are_compared_but_not_asked():
    """A crowd of new keys that votes as one: the known peers agree with each other, and none with it."""
    honest_CN, right_N = correlated_votes(6)
    crowd_CN = lies("collude", 40, honest_CN, right_N)
    known = [True] * 6 + [False] * 40
    result = found(np.concatenate([honest_CN, crowd_CN]), [FULL_WEIGHT] * 6 + [0] * 40, known)
    assert (base_weights(result.ratios) == [FULL_WEIGHT] * 6 + [0] * 40).all()
    assert (result.shared[:6] == FULL_WEIGHT).all()
    assert (result.shared[6:] == 40 * FULL_WEIGHT).all()


def test_who_has_no_weight_takes_none_from_those_it_copies():
    honest_CN, _ = correlated_votes(8)
    signs_CN = np.concatenate([honest_CN, honest_CN])
    result = found(signs_CN, [FULL_WEIGHT] * 8 + [0] * 8)
    assert (result.shared[:8] == FULL_WEIGHT).all()


@pytest.mark.parametrize(
    "signs_CN",
    [
        np.zeros((0, NUMBERS), np.int8),
        np.ones((MIN_CONTRIBUTORS - 1, NUMBERS), np.int8),
        np.ones((MIN_CONTRIBUTORS, 0), np.int8),
        np.array([[1], [-1], [1], [-1], [1], [-1]], np.int8),
        np.random.default_rng(0).choice(np.array([-1, 1], np.int8), (20, NUMBERS)),
    ],
    ids=["empty", "few contributors", "no numbers", "one number", "noise"],
)
def test_rounds_that_say_nothing(signs_CN):
    assert found(signs_CN) is None


def test_equal_votes_of_all_weigh_the_same():
    result = found(np.ones((30, NUMBERS), np.int8))
    assert len(set(zip(result.ratios.tolist(), result.shared.tolist(), strict=True))) == 1
    assert base_weights(result.ratios)[0] == FULL_WEIGHT


@given(
    st.integers(5, 40),
    st.sampled_from(["flip", "noise", "copy", "collude"]),
    st.integers(1, 300),
    st.randoms(use_true_random=False),
)
def test_the_result_follows_the_peers_in_any_order(contributors, kind, numbers, chance):
    count = max(1, contributors // 4)
    honest_CN, right_N = correlated_votes(contributors - count, numbers, seed=chance.randrange(100))
    signs_CN = np.concatenate([honest_CN, lies(kind, count, honest_CN, right_N)])
    bases = [chance.randrange(FULL_WEIGHT + 1) for _ in range(contributors)]
    known = [chance.random() < 0.8 for _ in range(contributors)]
    order = chance.sample(range(contributors), contributors)
    straight = found(signs_CN, bases, known)
    permuted = found(signs_CN[order], [bases[i] for i in order], [known[i] for i in order])
    if straight is None:
        assert permuted is None
        return
    assert (straight.ratios[order] == permuted.ratios).all()
    assert (straight.shared[order] == permuted.shared).all()


def test_weights_rise_from_nothing_to_full_between_two_ratios():
    ratios = np.array([-RATIO, 0, ZERO_RATIO, (ZERO_RATIO + FULL_RATIO) // 2, FULL_RATIO, 2 * RATIO])
    assert base_weights(ratios).tolist() == [0, 0, 0, FULL_WEIGHT // 2, FULL_WEIGHT, FULL_WEIGHT]


@pytest.mark.parametrize("without_votes", [0, 1, 2])
def test_owners_of_other_text_get_their_votes_back(without_votes):
    """Three owners, as with manual pages in three languages: correlations of 0.27 among the peers of an
    owner, and 0.05 with others. One owner has lost its votes."""
    generator = np.random.default_rng(5)
    common_N, *own = generator.choice(np.array([-1, 1], np.int8), (4, NUMBERS))
    right = [np.where(generator.random(NUMBERS) < 0.43, common_N, own_N) for own_N in own]
    signs_CN = np.concatenate(
        [np.where(generator.random((5, NUMBERS)) < 0.24, -right_N, right_N) for right_N in right]
    )
    bases = [0 if owner == without_votes else FULL_WEIGHT for owner in range(3) for _ in range(5)]
    weights = base_weights(found(signs_CN, bases, is_private=True).ratios).reshape(3, 5)
    assert (weights[without_votes] > 0).all()
    assert (np.delete(weights, without_votes, 0) == FULL_WEIGHT).all()
