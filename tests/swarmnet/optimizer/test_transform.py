"""Orthogonal transforms and their exact inverses, against explicit matrices."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import cos, pi, sqrt

import numpy as np
import pytest
import torch

from swarmnet.optimizer.tiling import factors
from swarmnet.optimizer.transform import DCT_BITS, FINE_DCT_BITS, TransformError, transform_of

CPU = torch.device("cpu")
CHUNKS = [64, 128, 256, 512, 1024, 2048, 4096]


def hadamard_matrix(size):
    row, column = np.arange(size)[:, None], np.arange(size)
    return 1 - 2 * np.array([[bin(r & c).count("1") % 2 for c in column] for (r,) in row])


def dct_matrix(size):
    scale = [sqrt((1 if i == 0 else 2) / size) for i in range(size)]
    return np.array([[scale[i] * cos(pi * (j + 0.5) * i / size) for j in range(size)] for i in range(size)])


def exact_by_matrices(name, sums_CN):
    """The exact inverse in int64 by explicit matrices."""
    rows, columns = factors(sums_CN.shape[1])
    if name == "dct":
        left, right = (np.round(dct_matrix(size) * 2**DCT_BITS).astype(np.int64) for size in (rows, columns))
        return np.stack([left.T @ sums.reshape(rows, columns) @ right for sums in sums_CN])
    left, right = hadamard_matrix(rows), hadamard_matrix(columns)
    # Hadamard coefficients are stored transposed.
    return np.stack([left.T @ sums.reshape(columns, rows).T @ right for sums in sums_CN])


def votes(chunks, chunk, voters, kept, seed=0):
    """int16 [chunks, chunk]: sums of +-1 votes of so many voters on `kept` random coefficients each."""
    random = np.random.default_rng(seed)
    sums = np.zeros((chunks, chunk), np.int16)
    for _ in range(voters):
        for row in sums:
            row[random.choice(chunk, kept, replace=False)] += random.choice([-1, 1], kept).astype(np.int16)
    return sums


@contextmanager
def threads(count) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["hadamard", "dct"])
def test_the_inverse_undoes_the_transform_and_the_norm_stays(name, chunk):
    values = torch.randn(3, chunk, generator=torch.Generator().manual_seed(1))
    transform = transform_of(name, chunk, CPU)
    coefficients = torch.zeros(3, chunk)
    transform.accumulate(coefficients, values.clone(), 0.0)
    assert torch.allclose(coefficients.norm(dim=1), values.norm(dim=1), rtol=1e-5)
    assert torch.allclose(transform.inverse(coefficients), values, atol=1e-5)


@pytest.mark.parametrize("name", ["hadamard", "dct"])
def test_accumulation_decays_the_momentum_and_adds_the_transform(name):
    generator = torch.Generator().manual_seed(2)
    first, second = torch.randn(2, 2, 256, generator=generator)
    transform = transform_of(name, 256, CPU)
    momentum = torch.zeros(2, 256)
    transform.accumulate(momentum, first.clone(), 0.5)
    transform.accumulate(momentum, second.clone(), 0.5)
    assert torch.allclose(transform.inverse(momentum), 0.5 * first + second, atol=1e-5)


def test_dct_puts_a_constant_chunk_into_its_first_coefficient():
    coefficients = torch.zeros(1, 4096)
    transform_of("dct", 4096, CPU).accumulate(coefficients, torch.ones(1, 4096), 0.0)
    assert coefficients[0, 0] == pytest.approx(64.0, abs=1e-4)
    assert coefficients[0, 1:].abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [64, 128, 4096])
@pytest.mark.parametrize("name", ["hadamard", "dct"])
@pytest.mark.parametrize(("voters", "kept"), [(1, 1), (4, 32), (7, 64)])
def test_the_exact_inverse_equals_integer_matrices(name, chunk, voters, kept):
    sums = votes(2, chunk, voters, kept)
    found = transform_of(name, chunk, CPU).exact_inverse(torch.from_numpy(sums), voters * kept)
    expected = exact_by_matrices(name, sums.astype(np.int64)).reshape(2, chunk)
    assert np.array_equal(found.to(torch.int64).numpy(), expected)


@pytest.mark.parametrize(
    ("name", "bound", "kind"),
    [("hadamard", 2**15 - 1, torch.int16), ("hadamard", 2**15, torch.int32), ("hadamard", 2**31, torch.int64),
     ("dct", 2**24 // 45**2, torch.float32), ("dct", 2**24 // 45**2 + 1, torch.float64)],
)  # fmt: skip
def test_the_worst_case_at_the_bound_is_still_exact(name, bound, kind):
    """All of the bound on few coefficients, with the signs that make one value as large as it can get."""
    sums = torch.zeros(1, 4096, dtype=torch.int64)
    sums[0, 65] = bound // 2
    sums[0, 130] = bound - bound // 2
    found = transform_of(name, 4096, CPU).exact_inverse(sums, bound)
    assert found.dtype == kind
    assert np.array_equal(found.to(torch.int64).numpy(), exact_by_matrices(name, sums.numpy()).reshape(1, -1))


def test_a_bound_beyond_all_formats_is_refused():
    with pytest.raises(TransformError):
        transform_of("dct", 4096, CPU).exact_inverse(torch.zeros(1, 4096), 2**45)
    with pytest.raises(TransformError):
        transform_of("hadamard", 4096, CPU).exact_inverse(torch.zeros(1, 4096), 2**63)
    with pytest.raises(TransformError):
        transform_of("fine-dct", 4096, CPU).exact_inverse(torch.zeros(1, 4096), 2**36)


@pytest.mark.parametrize("name", ["hadamard", "dct", "fine-dct"])
def test_the_exact_inverse_is_the_same_for_any_threads_and_any_company(name):
    sums = torch.from_numpy(votes(37, 4096, 4, 128))
    transform = transform_of(name, 4096, CPU)
    # Of fine-dct as much as it takes: between its products it rounds.
    sums, bound = (sums.long() << 21, 2**32) if name == "fine-dct" else (sums, 512)
    with threads(1):
        alone = transform.exact_inverse(sums, bound)
    with threads(2):
        assert torch.equal(transform.exact_inverse(sums, bound), alone)
    parts = [transform.exact_inverse(sums[start : start + 5], bound) for start in range(0, 37, 5)]
    assert torch.equal(torch.cat(parts), alone)


def test_reduced_precision_products_are_never_used_for_exact_sums():
    sums = torch.from_numpy(votes(2, 4096, 4, 128))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = transform_of("dct", 4096, CPU).exact_inverse(sums, 512)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), exact_by_matrices("dct", sums.numpy()).reshape(2, -1))


@pytest.mark.parametrize(("name", "least"), [("dct", 0.99), ("fine-dct", 0.99999)])
def test_how_many_signs_of_an_integer_dct_are_those_of_the_ideal_one(name, least):
    sums = votes(64, 4096, 4, 128)
    exact = transform_of(name, 4096, CPU).exact_inverse(torch.from_numpy(sums), 512).numpy()
    basis = dct_matrix(64)
    ideal = np.stack([basis.T @ chunk.reshape(64, 64) @ basis for chunk in sums]).reshape(64, 4096)
    assert np.mean(np.sign(exact) == np.sign(ideal)) >= least


@pytest.mark.parametrize("name", ["dct", "fine-dct"])
def test_a_tile_of_any_sides_is_transformed_and_the_rest_of_its_chunk_stays_zero(name):
    values = torch.zeros(3, 4096)
    values[:, : 44 * 61] = torch.randn(3, 44 * 61, generator=torch.Generator().manual_seed(3))
    transform, coefficients = transform_of(name, 4096, CPU, (44, 61)), torch.zeros(3, 4096)
    transform.accumulate(coefficients, values.clone(), 0.0)
    assert not coefficients[:, 44 * 61 :].any()
    assert torch.allclose(coefficients.norm(dim=1), values.norm(dim=1), rtol=1e-5)
    assert torch.allclose(transform.inverse(coefficients), values, atol=1e-5)
    exact = transform.exact_inverse(torch.round(coefficients * 2**10).long(), 2**24)
    assert not exact[:, 44 * 61 :].any()
    assert np.mean((torch.sign(exact) == torch.sign(values)).numpy()) > 0.98


@pytest.mark.parametrize(
    ("size", "bits"),
    [*((size, DCT_BITS) for size in (8, 16, 32, 64)), *((size, FINE_DCT_BITS) for size in range(1, 65))],
)
def test_no_entry_of_an_integer_dct_is_near_a_tie(size, bits):
    """Or else another machine's cosine could round it the other way."""
    entries = dct_matrix(size) * 2**bits
    assert np.abs(np.abs(entries - np.floor(entries)) - 0.5).min() > 1e-6


def test_unknown_names_are_refused():
    with pytest.raises(TransformError, match="wavelet"):
        transform_of("wavelet", 64, CPU)
