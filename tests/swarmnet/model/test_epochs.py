"""In an epoch an origin reads every window of every shard once, and each origin in an order of its own."""

from collections import Counter
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId, RunId
from swarmnet.model import epochs
from swarmnet.model.epochs import EpochReader, following, mixed, permuted, window_count, window_token_start

NAMES = [f"books/{number:03}.jsonl" for number in range(100)]


def reader(origin="12D3KooA", run="a" * 64, seed=0):
    return EpochReader(RunId(run), seed, PeerId(origin))


def epoch_of(who, names, epoch=0):
    order, shard = [], ""
    while True:
        now, shard = following(who, names, epoch, shard)
        if now != epoch:
            return order
        order.append(shard)


def test_an_epoch_has_every_shard_once_and_the_next_has_them_in_another_order():
    first, second = (epoch_of(reader(), NAMES, epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == NAMES
    assert first != second
    assert first == epoch_of(reader(), NAMES[::-1])


def test_run_seed_and_origin_each_change_the_order():
    orders = {tuple(epoch_of(who, NAMES)) for who in
              (reader(), reader(origin="12D3KooB"), reader(run="b" * 64), reader(seed=1))}  # fmt: skip
    assert len(orders) == 4


def test_origins_together_see_the_whole_text_long_before_one_of_them_has():
    orders = [epoch_of(reader(f"12D3Koo{number}"), NAMES) for number in range(8)]
    each = 50
    assert set().union(*(order[:each] for order in orders)) == set(NAMES)
    circles = {tuple(order[order.index(NAMES[0]) :] + order[: order.index(NAMES[0])]) for order in orders}
    assert len(circles) == 1, "they go round the same circle, from different places"


def test_a_shard_that_goes_or_comes_moves_no_other():
    whole = epoch_of(reader(), NAMES)
    assert epoch_of(reader(), NAMES[1:]) == [name for name in whole if name != NAMES[0]]
    behind = whole[whole.index(NAMES[0]) + 1]
    assert following(reader(), NAMES[1:], 0, NAMES[0]) == (0, behind), "it was being read when it went"


@given(st.integers(1, 700), st.text(max_size=5))
def test_a_permutation_has_every_number_once(count, key):
    assert sorted(permuted(number, count, key) for number in range(count)) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 17, 33, 65, 129, 256])
def test_a_permutation_of_any_length_moves_its_ends_and_takes_at_most_four_applications_on_average(count):
    with mock.patch.object(epochs, "_hash", wraps=epochs._hash) as hashed:
        orders = [[permuted(number, count, f"{key}") for number in range(count)] for key in range(10)]
    assert hashed.call_count / epochs._PASSES <= 4 * count * len(orders)
    assert all(sorted(order) == list(range(count)) for order in orders)
    for end in (0, -1):
        assert count == 1 or len({order[end] for order in orders}) > 1


def test_a_permutation_leaves_no_order_behind():
    order = [permuted(number, 1000, "key") for number in range(1000)]
    steps = Counter(later - earlier for earlier, later in pairwise(order))
    assert steps.most_common(1)[0][1] < 10
    assert abs(sum(order[:500]) / 500 - 499.5) < 50


@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 3))
def test_windows_cover_a_shard_without_overlap(tokens, length, epoch):
    count = window_count(tokens, length)
    starts = sorted(
        window_token_start(reader(), epoch, "shard", number, tokens, length) for number in range(count)
    )
    assert all(start >= 0 and start + length + 1 <= tokens for start in starts)
    assert all(later - earlier == length for earlier, later in pairwise(starts))
    assert tokens - count * length <= length, "and no window more would go in"


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.9, 0.05, 0.05), (3.0, 1.5)])
def test_texts_of_a_weight_have_their_share_at_any_time(weights):
    read, total = [0] * len(weights), sum(weights)
    for drawn in range(1, 1001):
        read[mixed(read, weights)] += 1
        shares = [drawn * weight / total for weight in weights]
        assert all(abs(count - share) <= 1 for count, share in zip(read, shares, strict=True))
