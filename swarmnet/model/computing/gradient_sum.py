"""Sum the gradients of microbatches while their backward pass still runs.

The sum is one flat vector in the layout of the parameters. A *leaf* is a tensor of weights that autograd
computes a gradient for. A hook of the leaf adds its gradient as soon as it is computed, and frees it. No
microbatch's whole gradient is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Layout, views_of
from swarmnet.model.norm_tracker import MAX_NORM

Used = TypeVar("Used")


class GradientSum:
    """The gradient sum of one stage. It stays finite and bounded, whatever peers send."""

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._device = device
        self.restart(layout)
        self._squares = torch.zeros((), device=device)
        """Sum of squares of the current gradient so far. For a CPU `_cpu_squares` is used instead, because
        four small tensors for each parameter took longer than adding its gradient."""
        self._cpu_squares = 0.0
        self._inverse_scale = 1.0

    def restart(self, layout: Layout) -> None:
        """Sum the gradients of these parameters from now on, from zero. Gradients of others are dropped."""
        self._flat = torch.zeros(layout.size, dtype=self._dtype, device=self._device)
        self._views = views_of(self._flat, layout)

    def sums_parameter(self, name: str) -> bool:
        return name in self._views

    def watch_leaf(self, name: str, leaf: Tensor) -> None:
        """Add each gradient of this leaf, which is the parameter `name`, from now on."""
        self._register_hook(lambda: self._views.get(name), _pop_grad, leaf)

    def watch_rows(self, start: int, stop: int, leaf: Tensor, pop_grad: Callable[[Tensor], Tensor]) -> None:
        """Add each gradient of this leaf to the range `start` to `stop` of the sum from now on.
        `pop_grad` removes the gradient from the leaf and returns it as a vector."""
        self._register_hook(lambda: self._flat[start:stop], pop_grad, leaf)

    def _register_hook(
        self, get_sum: Callable[[], Tensor | None], pop_grad: Callable[[Tensor], Tensor], leaf: Tensor
    ) -> None:
        """Make autograd call `_add_gradient` whenever it has computed the gradient of `leaf`."""
        hook = partial(self._add_gradient, get_sum, pop_grad)
        leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def add_gradient_of(self, loss: Tensor, leaves: list[Tensor], scale: float) -> bool:
        """Run the backward pass; the hooks add the gradients of `leaves`, divided by `scale`. Returns whether
        the gradient was finite and small enough to be summed. If not, what came after the limit was exceeded
        is left out."""
        self.begin(scale)
        torch.autograd.backward(loss, inputs=leaves)
        return self.was_within(lambda squares: squares)

    def begin(self, scale: float) -> None:
        """Start the gradient of a microbatch, which is `scale` (a power of two) times too large."""
        self._inverse_scale = 1.0 / scale
        self._cpu_squares = 0.0
        self._squares.zero_()

    def was_within(self, total: Callable[[Tensor], Tensor]) -> bool:
        """Return whether the microbatch's gradient was finite and its norm at most `MAX_NORM`. `total` sums a
        number over all devices that hold the stage together."""
        squares = total(self._squares + self._cpu_squares)
        return squares.item() <= MAX_NORM**2  # The only wait for the device.

    def use(self, use: Callable[[Tensor], Used]) -> Used:
        """Call `use` with the sum since the last call, [layout.size] with zero in the padding, and return its
        result. The sum is zero afterwards, even if `use` raises."""
        try:
            return use(self._flat)
        finally:
            self._flat.zero_()

    def _add_gradient(
        self, get_sum: Callable[[], Tensor | None], pop_grad: Callable[[Tensor], Tensor], leaf: Tensor
    ) -> None:
        """Add the gradient of `leaf` to its part of the sum, and its squared norm to that of the microbatch.
        The gradient is left out if the norm of the microbatch now exceeds `MAX_NORM`. `pop_grad` removes the
        gradient from the leaf. `get_sum` returns the part of the sum; None if the leaf is not summed."""
        gradient, sum = pop_grad(leaf), get_sum()
        if sum is None:  # The leaf's graph was built before the set of summed parameters changed.
            return
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32) * self._inverse_scale
        if gradient.device.type != "cpu":  # All stays on the device, because `norm.item()` would wait for it.
            self._squares.addcmul_(norm, norm)
            counted = torch.where(self._squares <= MAX_NORM**2, gradient, 0)
            sum.add_(counted, alpha=self._inverse_scale)
            return
        norm_value = norm.item()
        self._cpu_squares += norm_value * norm_value
        if self._cpu_squares <= MAX_NORM**2:  # No comparison with NaN is true.
            sum.add_(gradient, alpha=self._inverse_scale)


def _pop_grad(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None, "this is called when it is there"
    return gradient
