"""Polar factors of many matrices are those of each, by whichever form of the iteration."""

import pytest
import torch

from swarmnet.model.flat_layout import Entry
from swarmnet.optimizer.device_groups.device_group import ALONE
from swarmnet.optimizer.polar_factor import CPU_BATCH_NUMBERS, matrix_batches, orthogonal, polar_factors


@pytest.mark.parametrize("shape", [(32, 32), (32, 64), (64, 32), (96, 256), (300, 100)])
def test_the_iteration_on_gram_matrices_gives_the_signs_of_that_on_the_matrix(shape):
    """The spectrum falls as that of a momentum does, to where float32 has the fewest digits left."""
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(3, *shape, generator=generator), full_matrices=False)
    matrices = left * torch.arange(1.0, min(shape) + 1) ** -1.5 @ right
    expected = torch.stack([orthogonal(matrix) for matrix in matrices])
    found = polar_factors(list(matrices))
    assert found.shape == expected.shape
    assert (found.sign() == expected.sign()).float().mean() > 0.999
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", [(4, 4), (4, 16)])
def test_a_zero_matrix_stays_zero(shape):
    assert not polar_factors([torch.zeros(shape)]).any()


def test_batches_have_one_shape_and_fit_the_cache_or_are_single_matrices():
    shapes = [(8, 8), (1024, 64), (8, 8), (64, 64), (1024, 64)] + 40 * [(64, 64)]
    entries = [Entry(str(number), shape, 0, "") for number, shape in enumerate(shapes)]
    batches = list(matrix_batches(entries, torch.device("cpu"), ALONE))
    assert sorted(entry.name for batch in batches for entry in batch) == sorted(map(str, range(45)))
    for batch in batches:
        assert len({entry.shape for entry in batch}) == 1
        assert len(batch) == 1 or sum(entry.size for entry in batch) <= CPU_BATCH_NUMBERS
    assert max(len(batch) for batch in batches) == 8
