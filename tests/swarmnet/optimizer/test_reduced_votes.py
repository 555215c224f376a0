"""Votes through reducers: counts are exact, and what no honest peer can have sent is refused."""

from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from math import log2

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import PEERS, bent, gradient_of, manifest, shapes_of

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.method import ContributionError, method_of
from swarmnet.optimizer.reduced_votes import ReducedVotes, count_code
from swarmnet.optimizer.step import dense
from swarmnet.rounds.result_table import MAX_CONTRIBUTORS, Contributor, tag_of

SHARDS = 3
RUN = manifest(method="sign-muon", topology="sharded-reduce", shards=SHARDS)
ALL_GATHER = replace(RUN, sync=replace(RUN.sync, topology="all-gather"))
LAYOUT = layout_of(shapes_of(2))
TINY = layout_of({"model.norm.weight": (3,), "lm_head.weight": (2, 5)})
"""Fewer chunks than shards: some of these have no votes."""
REDUCERS = [PeerId(f"reducer {number}") for number in range(4)]


def run(fragments):
    return replace(RUN, sync=replace(RUN.sync, fragments=fragments))


def votes_by(count, layout=LAYOUT, settings=RUN):
    """Payloads by peer."""
    return {
        peer: method_of(settings, layout).contribute(gradient_of(layout, number), 7, 0, peer)
        for number, peer in enumerate(PEERS[:count])
    }


def slices_of(method, payloads):
    """Slices by shard and contributor."""
    found = {}
    for peer, payload in payloads.items():
        for shard, data in enumerate(method.slices(payload)):
            found.setdefault(shard, {})[Contributor.of(peer, ContributionId(tag_of(peer)), 100)] = data
    return found


def step_of(method, members):
    tally = method.tally(0)
    for peer, payload in members.items():
        tally.add(peer, payload)
    return dense(tally.step(), method.state)


@pytest.mark.parametrize("fragments", [1, 4, 64])
@pytest.mark.parametrize("layout", [LAYOUT, TINY])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_one_result_or_one_of_each_shard_makes_the_step_of_all_contributions(fragments, layout, count):
    method = method_of(run(fragments), layout)
    assert isinstance(method, ReducedVotes)
    payloads = votes_by(count, layout, run(fragments))
    slices = slices_of(method, payloads)
    whole = replace(ALL_GATHER, sync=replace(ALL_GATHER.sync, fragments=fragments))
    expected = step_of(method_of(whole, layout), payloads)
    assert expected.any() or fragments > layout.parameters, "some of so many fragments have no numbers"
    assert torch.equal(step_of(method, {REDUCERS[0]: method.reduce(slices)}), expected)
    each = {REDUCERS[shard]: method.reduce({shard: slices[shard]}) for shard in range(SHARDS)}
    for order in permutations(each):
        assert torch.equal(step_of(method, {peer: each[peer] for peer in order}), expected)


def test_disjoint_results_of_one_shard_add_up_and_of_overlapping_ones_the_largest_counts():
    method, payloads = method_of(RUN, LAYOUT), votes_by(5)
    slices = slices_of(method, payloads)

    def by(first, last):
        return method.reduce({shard: dict(list(of.items())[first:last]) for shard, of in slices.items()})

    def of(first, last):
        return step_of(method_of(ALL_GATHER, LAYOUT), dict(list(payloads.items())[first:last]))

    assert torch.equal(step_of(method, {REDUCERS[0]: by(0, 3), REDUCERS[1]: by(3, 5)}), of(0, 5))
    assert torch.equal(step_of(method, {REDUCERS[0]: by(0, 3), REDUCERS[1]: by(2, 4)}), of(0, 3))


@pytest.mark.parametrize(("contributors", "bits"), [(1, 1), (2, 1.6), (3, 2), (5, 8 / 3)])
def test_a_count_takes_the_bits_of_its_contributors(contributors, bits):
    method = method_of(RUN, LAYOUT)
    sums = method.sums(0, slices_of(method, votes_by(contributors))[0])
    assert len(sums) == pytest.approx(bits * method.slice_bytes[0], abs=8 * len(LAYOUT.planes))
    assert len(sums) == method.sums_bytes(0, contributors, memoryview(sums))


def test_counts_take_hardly_more_bits_than_their_numbers_of_values_have():
    bits = {count: 8 * count_code(count).word_bytes / count_code(count).digits for count in range(1, 1025)}
    assert all(log2(count + 1) <= each < 1.15 * log2(count + 1) for count, each in bits.items())
    assert [bits[count] for count in (1, 3, 8, 16, 64)] == [1, 2, 3.2, 64 / 15, 56 / 9]


@given(st.data(), st.integers(1, MAX_CONTRIBUTORS), st.integers(0, 3), st.integers(1, 40))
def test_counts_are_read_as_they_were_written(data, contributors, chunks, width):
    """A word is a number in base k + 1: Python's integers say which."""
    size, code = chunks * width, count_code(contributors)
    numbers = data.draw(st.lists(st.integers(0, contributors), min_size=size, max_size=size))
    counts = np.array(numbers, np.uint16).reshape(chunks, width)
    written = code.write(counts)
    assert len(written) == code.bytes_of(size)
    words = [
        sum(digit * (contributors + 1) ** place for place, digit in enumerate(numbers[first:][: code.digits]))
        for first in range(0, size, code.digits)
    ]
    assert written == b"".join(word.to_bytes(code.word_bytes, "little") for word in words)
    assert np.array_equal(code.read(memoryview(written), chunks, width), counts)


@given(st.data(), st.integers(1, MAX_CONTRIBUTORS), st.integers(1, 40))
def test_bytes_that_are_no_counts_are_refused(data, contributors, width):
    code = count_code(contributors)
    size = code.bytes_of(width)
    given = data.draw(st.binary(min_size=size, max_size=size) | st.binary(max_size=2 * size))
    try:
        counts = code.read(memoryview(given), 1, width)
    except ContributionError:
        return
    assert counts.max() <= contributors
    assert code.write(counts) == given, "counts have one form"


def test_a_result_follows_from_its_slices_and_from_no_others():
    method = method_of(RUN, LAYOUT)
    slices = slices_of(method, votes_by(3))
    result = method.reduce(slices)
    for shard, of_shard in slices.items():
        assert method.follows(result, shard, dict(reversed(of_shard.items())))
        first = next(iter(of_shard))
        flipped = of_shard | {first: bytes([of_shard[first][0] ^ 1]) + of_shard[first][1:]}
        assert not method.follows(result, shard, flipped)
        assert not method.follows(result, shard, of_shard | {first: of_shard[first] + b"\0"})


@given(st.data())
def test_bent_slices_and_sums_are_refused_or_count_each_contributor_once(data):
    method = method_of(RUN, LAYOUT)
    contributors = 2
    of_shard = slices_of(method, votes_by(contributors))[0]
    with suppress(ContributionError):
        method.check_slice(0, bent(next(iter(of_shard.values())), data))
    sums = bent(method.sums(0, of_shard), data)
    try:
        counts = method._counts(0, contributors, memoryview(sums))
    except ContributionError:
        return
    assert all(count_CM.max(initial=0) <= contributors for count_CM in counts)
