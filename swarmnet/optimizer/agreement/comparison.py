"""Compare the votes of the contributors of one round: who agrees with the others, and whose votes are alike.

Honest peers train on different text, yet their votes are correlated. Flipped, invented and old votes are not,
or less. The correlations of all pairs follow from the votes alone, so all peers compute the same ones. All
numbers are integers.

    agreement(i) = mean of votes(j) * correlation(i, j) over the others, except those alike, weighed by votes
    ratio(i)     = max(agreement(i), 3/4 agreement(i) with full votes) / median of the positive agreements,
                   weighed by votes; the second only if it is positive

A contributor's votes in this mean start at its weight so far. They are computed again from the ratios a few
times (power iteration), so that liars do not confirm each other. Agreement with the *majority* would not do:
honest votes are noisy, so a few peers that vote as one add up to the majority.

Liars may err at random around a common wrong direction, so that they are no more alike than honest peers are.
They agree with each other alone. So in the end a contributor's correlations count only up to a multiple of
their mean over the less agreeing half of all votes, which is nothing for them:

    counted(i, j) = min(correlation(i, j), 12 * mean of correlation(i, *) over the lower half, at least 0)

Owners of other text agree among themselves, too, and in time hardly with the others. In a run whose text is
private, correlations count in full.

An owner without votes would be compared with the others only, and never get any back. So agreement counts as
well as it is with full votes of all known contributors. This is no gain for liars: flipped votes oppose the
others', and those that are alike do not count.

Pairs that are far more alike than others share one vote, as copies of one contribution do. Pairs that are
far more unlike are left out of the mean, so that no liar discredits one honest peer by its exact opposite.

Shapes: C contributors, N compared numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarmnet.optimizer.agreement.weight_report import FULL_WEIGHT
from swarmnet.rounds.open_round import MIN_CONTRIBUTORS

Integers: TypeAlias = NDArray[np.int64]
MIN_ASKED = 3
"""With fewer contributors of any weight, all are asked again: one or two must not decide alone."""
ONE = 1 << 16
"""A correlation of 1."""
RATIO = 1 << 10
"""The median agreement, as a ratio."""
FULL_RATIO = RATIO // 2
"""From this ratio on, a vote counts in full. Honest peers lie above it, so that their weights are equal."""
ZERO_RATIO = RATIO // 4
"""Up to this ratio, a vote does not count. With 3/8, and 5/8 in full, one of three owners of text in
different languages lost its votes (docs/learning.md)."""
MAX_RATIO = 2 * RATIO
FULL_VOTES_SHARE = 3, 4
"""Share of the agreement with full votes that counts. With all of it, old contributions that are repeated
would keep a fifth of a vote instead of a tenth."""
LIMIT_FACTOR = 12
"""Multiple of the mean correlation with the less agreeing half of votes up to which correlations count. With
six such liars of 16, 4 leaves the least of the honest peers 0.65 of the median agreement, 12 leaves it 0.91;
with 32, liars get a vote in 15 % of rounds instead of 7 % (synthetic votes, honest correlations of 0.12)."""
NOISE_ERRORS = 4
"""A round whose median agreement is below this many standard errors says nothing: its votes are noise."""
ALIKE_FACTOR = 2
ALIKE_MARGIN = ONE // 20
"""A pair is alike if its correlation exceeds `ALIKE_FACTOR` times the upper quartile of all pairs, plus this.
With the median in place of the quartile, a third of liars that flip their signs would seem alike."""
ITERATIONS = 5
"""Computations of the votes before correlations are limited."""
_VOTE = 1 << 12
"""A full vote in the mean of correlations."""


@dataclass(frozen=True, slots=True)
class RoundAgreement:
    """What one round says of its contributors."""

    ratios: Integers
    """The agreement of each contributor in units of the median, times `RATIO`."""
    shared: Integers
    """Number of peers that share its vote, itself included, times `FULL_WEIGHT`. Newcomers share only those
    of other newcomers."""


def base_weights(ratios: Integers) -> Integers:
    """Return the weight that follows from each ratio, 0 to `FULL_WEIGHT`, before votes are shared."""
    weights = (ratios - ZERO_RATIO) * FULL_WEIGHT // (FULL_RATIO - ZERO_RATIO)
    return np.clip(weights, 0, FULL_WEIGHT)


def compare(
    signs_CN: NDArray[np.int8], bases_C: Integers, known_C: NDArray[np.bool_], *, is_private: bool = False
) -> RoundAgreement | None:
    """Compare contributors by their votes, +1 or -1. None if the round says nothing of them. `is_private`:
    whether each trains on its own text.

    `bases_C` are their weights so far, 0 to `FULL_WEIGHT`. Only contributors in `known_C` are asked whom they
    agree with. If these are fewer than `MIN_CONTRIBUTORS`, or fewer than `MIN_ASKED` have weight, all are
    asked, with equal weights.
    """
    contributors, numbers = signs_CN.shape
    if contributors < MIN_CONTRIBUTORS or not numbers:
        return None
    has_few = np.count_nonzero(known_C) < MIN_CONTRIBUTORS
    if has_few or np.count_nonzero(known_C & (bases_C > 0)) < MIN_ASKED:
        bases_C = np.full(contributors, FULL_WEIGHT, np.int64)
        known_C = np.ones(contributors, np.bool_)
    floats_CN = signs_CN.astype(np.float32)
    # Partial sums are integers below 2^24, which float32 holds exactly, so the order of the sum is free.
    correlations_CC = (floats_CN @ floats_CN.T).astype(np.int64) * ONE // numbers
    np.fill_diagonal(correlations_CC, 0)
    asked_C = known_C & (bases_C > 0)
    limit = _usual_limit(correlations_CC, asked_C)
    alike_CC = correlations_CC > limit
    counted_CC = np.where(known_C[:, None], asked_C, asked_C | ~known_C)
    shared_C = FULL_WEIGHT * (1 + (alike_CC & counted_CC).sum(1))
    others_CC = (np.abs(correlations_CC) <= limit) & ~np.eye(contributors, dtype=np.bool_)

    weights_C = bases_C * known_C
    ratios_C = np.zeros(contributors, np.int64)
    last = _means if is_private else _limited_means
    for means in (*[_means] * ITERATIONS, last):
        votes_C = weights_C * _VOTE // shared_C
        agreement_C = means(correlations_CC, others_CC * votes_C)
        median = _weighted_median(agreement_C, np.where(agreement_C > 0, votes_C, 0))
        if median <= 0:
            return None
        ratios_C = np.clip(agreement_C * RATIO // median, -RATIO, MAX_RATIO)
        weights_C = np.minimum(bases_C * known_C, base_weights(ratios_C))
    share, whole = FULL_VOTES_SHARE
    full_votes_C = FULL_WEIGHT * known_C * _VOTE // shared_C
    with_full_votes_C = last(correlations_CC, others_CC * full_votes_C) * share // whole
    full_ratios_C = np.minimum(with_full_votes_C * RATIO // median, MAX_RATIO)
    ratios_C = np.where(full_ratios_C > 0, np.maximum(ratios_C, full_ratios_C), ratios_C)
    voters = max(1, int(votes_C.sum()) // _VOTE)
    noise = NOISE_ERRORS * ONE // isqrt(numbers * voters)
    return RoundAgreement(ratios_C, shared_C) if median > noise else None


def _means(correlations_CC: Integers, votes_CC: Integers) -> Integers:
    """Return the mean of each row of correlations, weighed by votes."""
    mean_C: Integers = (votes_CC * correlations_CC).sum(1) // np.maximum(1, votes_CC.sum(1))
    return mean_C


def _limited_means(correlations_CC: Integers, votes_CC: Integers) -> Integers:
    """Return the mean of each row of correlations, weighed by votes, after limiting them to `LIMIT_FACTOR`
    times the mean over the lower half of votes."""
    order_CC = np.argsort(correlations_CC, axis=1, kind="stable")
    rising_CC = np.take_along_axis(correlations_CC, order_CC, axis=1)
    votes_CC = np.take_along_axis(votes_CC, order_CC, axis=1)
    before_CC = np.cumsum(votes_CC, axis=1) - votes_CC
    half_C1 = votes_CC.sum(1, keepdims=True) // 2
    lower_C = _means(rising_CC, np.clip(half_C1 - before_CC, 0, votes_CC))
    return _means(np.minimum(rising_CC, LIMIT_FACTOR * np.maximum(0, lower_C)[:, None]), votes_CC)


def _usual_limit(correlations_CC: Integers, asked_C: NDArray[np.bool_]) -> int:
    """Return the size that correlations of honest pairs do not exceed, from the pairs that are `asked_C`."""
    sizes_CC = np.abs(correlations_CC[np.ix_(asked_C, asked_C)])
    pairs = np.sort(sizes_CC[np.triu_indices(len(sizes_CC), 1)])
    quartile = int(pairs[3 * len(pairs) // 4]) if len(pairs) else ONE
    return ALIKE_FACTOR * quartile + ALIKE_MARGIN


def _weighted_median(values_C: Integers, weights_C: Integers) -> int:
    """Return the smallest value at which the values up to it have half of all weight; 0 without weight."""
    order_C = np.argsort(values_C, kind="stable")
    sums_C = np.cumsum(weights_C[order_C])
    if not sums_C[-1]:
        return 0
    return int(values_C[order_C[np.searchsorted(2 * sums_C, sums_C[-1])]])
