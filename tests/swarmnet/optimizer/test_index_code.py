"""Index codes: exact sizes, round trips, and refusal of everything that is not canonical."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.optimizer.index_code import (
    ContributionError,
    EliasFano,
    GroupOffsets,
    log2_exact,
    pack,
    packed_bytes,
    unpack,
)

SIZES = [(64, 1), (64, 64), (128, 4), (256, 8), (4096, 32), (4096, 128)]
SMALL = [(64, 1), (64, 2), (64, 8), (128, 64), (128, 128)]


def random_sets(chunk, kept, chunks, seed):
    random = np.random.default_rng(seed)
    return np.stack([np.sort(random.choice(chunk, kept, replace=False)) for _ in range(chunks)])


@pytest.mark.parametrize(("kept", "size"), [(32, 36), (128, 112)])
def test_elias_fano_has_the_size_the_formula_says(kept, size):
    """36 and 112 bytes of indices; with a sign bit each 40 and 128 bytes a chunk."""
    code = EliasFano(4096, kept)
    assert packed_bytes(1, code.bits) == size
    assert packed_bytes(1, code.bits + kept) == kept * (3 + log2_exact(4096 // kept)) // 8


def test_a_group_vote_of_128_takes_six_bits():
    assert packed_bytes(1, GroupOffsets(4096, 128).bits + 128) == 96


@pytest.mark.parametrize(("chunk", "kept"), SIZES)
def test_elias_fano_gives_back_any_set(chunk, kept):
    code = EliasFano(chunk, kept)
    for seed in range(20):
        indices = random_sets(chunk, kept, 3, seed)
        packed = pack(code.write(indices))
        assert np.array_equal(code.read(unpack(packed, 3, code.bits)), indices)


@pytest.mark.parametrize(("chunk", "kept"), [(64, 2), (4096, 32)])
def test_elias_fano_gives_back_the_extreme_sets(chunk, kept):
    code = EliasFano(chunk, kept)
    indices = np.stack([np.arange(kept), np.arange(chunk - kept, chunk)])
    assert np.array_equal(code.read(code.write(indices)), indices)


@pytest.mark.parametrize(("chunk", "kept"), SIZES)
def test_group_offsets_give_back_any_choice(chunk, kept):
    code = GroupOffsets(chunk, kept)
    offsets = np.random.default_rng(0).integers(0, chunk // kept, (5, kept))
    indices = offsets * kept + np.arange(kept)
    packed = pack(code.write(indices))
    assert np.array_equal(code.read(unpack(packed, 5, code.bits)), indices)


@given(st.sampled_from(SMALL), st.data())
def test_random_bytes_are_refused_or_are_the_one_code_of_a_valid_set(size, data):
    chunk, kept = size
    code = EliasFano(chunk, kept)
    length = packed_bytes(2, code.bits)
    packed = data.draw(st.binary(min_size=length, max_size=length))
    try:
        indices = code.read(unpack(packed, 2, code.bits))
    except ContributionError:
        return
    assert indices.shape == (2, kept)
    assert indices.min() >= 0
    assert indices.max() < chunk
    assert np.all(indices[:, 1:] > indices[:, :-1])
    assert pack(code.write(indices)) == packed


@given(st.integers(0, 2**32), st.integers(0, 2 * 8 * 36 - 1), st.integers(0, 2 * 8 * 36 - 1))
def test_flipped_bits_never_decode_to_the_same_set_or_to_a_bad_one(seed, one, other):
    """Two flips keep the number of unary ones in half of the cases, so this gets past the count."""
    code = EliasFano(4096, 32)
    indices = random_sets(4096, 32, 2, seed)
    packed = np.frombuffer(pack(code.write(indices)), np.uint8).copy()
    for place in {one, other}:
        packed[place // 8] ^= 1 << (place % 8)
    try:
        found = code.read(unpack(packed.tobytes(), 2, code.bits))
    except ContributionError:
        return
    assert not np.array_equal(found, indices)
    assert found.max() < 4096
    assert np.all(found[:, 1:] > found[:, :-1])
    assert pack(code.write(found)) == packed.tobytes()


def test_only_powers_of_two_have_an_exact_logarithm():
    assert [log2_exact(number) for number in (1, 2, 4096)] == [0, 1, 12]
    for number in (0, 3, 96):
        with pytest.raises(ValueError, match="power of two"):
            log2_exact(number)
