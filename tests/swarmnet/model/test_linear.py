import pytest
import torch
from torch import Tensor
from torch.nn import functional

import swarmnet.model.linear
from swarmnet.model.linear import linear, products


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(swarmnet.model.linear, "_onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(swarmnet.model.linear, "SMALL", 1)
    return request.param


def made(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", [(3, 5, 32), (1, 1, 32), (7, 32)])
def test_product_and_gradients_are_those_of_functional_linear(product: bool, size: tuple[int, ...]) -> None:
    x, weight = made(*size).requires_grad_(), made(48, 32).requires_grad_()
    gradient = made(*size[:-1], 48)
    found, expected = linear(x, weight), functional.linear(x, weight)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("several", [1, 2, 3])
def test_several_products_of_one_x_are_single_ones_to_the_bit(product: bool, several: int) -> None:
    weights = [made(8 * (number + 1), 32).requires_grad_() for number in range(several)]
    upwards = [made(3, 5, 8 * (number + 1)) for number in range(several)]
    x = made(3, 5, 32).requires_grad_()
    within = 2.0 * x  # As in a decoder, where gradients meet inside the graph.
    together = products(within, *weights)
    ours = torch.autograd.grad(together, (x, *weights), upwards)
    within = 2.0 * x
    singly = [linear(within, weight) for weight in weights]
    theirs = torch.autograd.grad(singly, (x, *weights), upwards)
    for one, other in zip((*together, *ours), (*singly, *theirs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("within", [slice(0, 2), slice(1, 3), slice(0, 3)], ids=["small", "large", "both"])
def test_small_products_beside_large_ones_are_those_that_they_are_alone(
    monkeypatch: pytest.MonkeyPatch, within: slice
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    by_onednn, product = [], swarmnet.model.linear._product
    monkeypatch.setattr(swarmnet.model.linear, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(swarmnet.model.linear, "SMALL", 20 * 64 * 64)

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        by_onednn.append(len(weight))
        return product(x, weight)

    monkeypatch.setattr(swarmnet.model.linear, "_product", counted)
    weights = [made(rows, 64).requires_grad_() for rows in (16, 63, 64, 96)][within.start : within.stop + 1]
    upwards = [made(20, len(weight)) for weight in weights]
    x = made(20, 64).requires_grad_()
    together = products(x, *weights)
    assert by_onednn == [len(weight) for weight in weights if len(weight) >= 64]
    singly = [linear(x, weight) for weight in weights]
    ours = torch.autograd.grad(together, (x, *weights), upwards)
    theirs = torch.autograd.grad(singly, (x, *weights), upwards)
    for one, other in zip((*together, *ours), (*singly, *theirs), strict=True):
        assert torch.equal(one, other)


def test_operands_may_lie_in_memory_in_any_order(product: bool) -> None:
    x, weight = made(5, 3, 32).transpose(0, 1), made(32, 48).t()
    torch.testing.assert_close(
        linear(x, weight), linear(x.contiguous(), weight.contiguous()), atol=2e-5, rtol=1e-5
    )


def test_only_the_gradients_asked_for_are_computed(product: bool) -> None:
    x, weight = made(4, 32), made(48, 32).requires_grad_()
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    with torch.no_grad():
        assert not linear(x, weight).requires_grad


def test_other_precisions_work_too() -> None:
    assert linear(made(4, 32).double(), made(48, 32).double()).dtype == torch.float64
