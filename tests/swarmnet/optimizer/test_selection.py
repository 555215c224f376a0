"""Selections and the momentum they take from."""

import pytest
import torch

from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.momentum import Momentum
from swarmnet.optimizer.sparsify import selection_of
from swarmnet.optimizer.transform import transform_of

CPU = torch.device("cpu")
LAYOUT = layout_of({
    "model.layers.0.mlp.up_proj.weight": (100, 64),
    "model.layers.0.input_layernorm.weight": (40,),
    "model.layers.1.mlp.up_proj.weight": (100, 64),
    "lm_head.weight": (256, 24),
})  # fmt: skip


def gradient_of(layout, seed):
    """float32 [layout.size], zero in the padding."""
    gradient = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    for start, stop in layout.padding:
        gradient[start:stop] = 0
    return gradient


def momentum_of(layout, transform, decay):
    transforms = [transform_of(transform, plane.chunk, CPU) for plane in layout.planes]
    return Momentum(layout=layout, transforms=transforms, decay=decay, clip=1.0, device=CPU)


@pytest.mark.parametrize("selection", ["top-k", "group"])
def test_what_is_sent_leaves_the_momentum_and_nothing_else_changes(selection):
    layout = LAYOUT
    momentum = momentum_of(layout, "hadamard", 0.9)
    momentum.accumulate(gradient_of(layout, 3), 5)
    before = [plane_CN.clone() for plane_CN in momentum.planes()]
    selections = [selection_of(selection, plane.chunk, 64) for plane in layout.planes]
    sent = momentum.take(selections, 0)
    for old_CN, new_CN, part in zip(before, momentum.planes(), sent, strict=True):
        assert torch.equal(part.values, old_CN.gather(1, part.indices))
        assert not new_CN.gather(1, part.indices).any()
        assert torch.equal(new_CN.scatter(1, part.indices, part.values), old_CN)
        assert int((new_CN != old_CN).sum()) == part.indices.numel()


@pytest.mark.parametrize("kept", [1, 32, 128])
def test_top_k_takes_the_largest_magnitudes(kept):
    momentum = torch.randn(9, 4096, generator=torch.Generator().manual_seed(0))
    indices = selection_of("top-k", 4096, kept).choose(momentum)
    assert torch.equal(indices, momentum.abs().topk(kept, dim=1).indices.sort(dim=1).values)


def test_top_k_breaks_ties_towards_the_front():
    momentum = torch.zeros(3, 64)
    momentum[1, 40:] = -1.0
    momentum[2, [5, 50]] = 2.0
    momentum[2, 9:20] = 1.0
    indices = selection_of("top-k", 64, 256).choose(momentum)
    assert indices.tolist() == [[0, 1, 2, 3], [40, 41, 42, 43], [5, 9, 10, 50]]


@pytest.mark.parametrize("kept", [1, 32, 128, 4096])
def test_group_takes_the_largest_magnitude_of_each_group(kept):
    momentum = torch.randn(5, 4096, generator=torch.Generator().manual_seed(0))
    indices = selection_of("group", 4096, kept).choose(momentum)
    assert torch.equal(indices % kept, torch.arange(kept).expand(5, -1))
    taken = momentum.abs().gather(1, indices)
    best = momentum.abs().view(5, -1, kept).amax(dim=1)
    assert torch.allclose(taken, best, rtol=2.0**-11)


def test_a_block_is_clipped_and_its_neighbours_are_not():
    layout = LAYOUT
    big = gradient_of(layout, 1)
    for start, stop in layout.block_ranges()["model.layers.1"]:
        big[start:stop] *= 1e6
    momenta = []
    for gradient in (gradient_of(layout, 1), big):
        momentum = momentum_of(layout, "hadamard", 0.0)
        momentum.accumulate(gradient, 1)
        momenta.append(momentum.values())
    # Norms here are far above 1 in both, so the clipped result is the same.
    assert torch.allclose(momenta[0], momenta[1], atol=1e-6)
    for ranges in layout.block_ranges().values():
        norm = torch.cat([momenta[0][start:stop] for start, stop in ranges]).norm()
        assert norm == pytest.approx(1.0, rel=1e-5)


def test_a_small_gradient_is_averaged_over_its_tokens_and_not_clipped():
    layout = layout_of({"lm_head.weight": (64, 64)})
    momentum = momentum_of(layout, "hadamard", 0.0)
    momentum.accumulate(torch.full((4096,), 0.08), 8)
    coefficients = torch.zeros(1, 4096)
    coefficients[0, 0] = 0.01 * 64  # All of a constant, times the root of their number.
    assert torch.allclose(momentum.planes()[0], coefficients, atol=1e-6)
