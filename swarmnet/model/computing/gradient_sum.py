"""Sum the gradients of microbatches while their backward pass still runs.

Each parameter's gradient is added as soon as it is computed and then freed. No microbatch's whole gradient is
ever in memory.
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

    def __init__(self, layout: Layout, device: torch.device, number: torch.dtype) -> None:
        self._number, self._device = number, device
        self.gather(layout)
        self._squares = torch.zeros((), device=device)
        """Sum of squares of the current gradient so far. For a CPU `_squares_here` is used instead, because
        four small tensors for each parameter took longer than adding its gradient."""
        self._squares_here = 0.0

    def gather(self, layout: Layout) -> None:
        """Sum the gradients of these parameters from now on, from zero. Gradients of others are dropped."""
        self._flat = torch.zeros(layout.size, dtype=self._number, device=self._device)
        self._views = views_of(self._flat, layout)

    def follows(self, name: str) -> bool:
        return name in self._views

    def follow(self, name: str, leaf: Tensor) -> None:
        """Add the gradient of this leaf, which is the parameter `name`."""
        self._hook(lambda: self._views.get(name), _let_go, leaf)

    def follow_rows(self, start: int, stop: int, leaf: Tensor, let_go: Callable[[Tensor], Tensor]) -> None:
        """Add the gradient of a leaf to this range of the sum. `let_go` removes it from the leaf."""
        self._hook(lambda: self._flat[start:stop], let_go, leaf)

    def _hook(
        self, place: Callable[[], Tensor | None], let_go: Callable[[Tensor], Tensor], leaf: Tensor
    ) -> None:
        take = partial(self._take, place, let_go)
        leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def add_gradient_of(self, loss: Tensor, leaves: list[Tensor]) -> bool:
        """Run backward and return whether the gradient was finite and small enough to be summed. If not,
        values after the invalid one are left out."""
        self.begin()
        torch.autograd.backward(loss, inputs=leaves)
        return self.was_within(lambda squares: squares)

    def begin(self) -> None:
        """Start the gradient of a microbatch."""
        self._squares_here = 0.0
        self._squares.zero_()

    def was_within(self, total: Callable[[Tensor], Tensor]) -> bool:
        """Return whether the gradient was finite and small enough. `total` sums over several devices."""
        squares = total(self._squares + self._squares_here)
        return squares.item() <= MAX_NORM**2  # The only wait for the device.

    def use(self, use: Callable[[Tensor], Used]) -> Used:
        """Return what `use` makes of the sum since the last call: [layout.size], zero in the padding. The sum
        is zero afterwards, even if `use` raises."""
        try:
            return use(self._flat)
        finally:
            self._flat.zero_()

    def _take(
        self, place: Callable[[], Tensor | None], let_go: Callable[[Tensor], Tensor], leaf: Tensor
    ) -> None:
        """Add the gradient of a leaf to its place unless the microbatch has exceeded the norm limit."""
        gradient, sum = let_go(leaf), place()
        if sum is None:  # Its graph is older than the current layout.
            return
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        if gradient.device.type != "cpu":  # Reading the norm would wait for the device.
            self._squares.addcmul_(norm, norm)
            sum += torch.where(self._squares <= MAX_NORM**2, gradient, 0)
            return
        found = norm.item()
        self._squares_here += found * found
        if self._squares_here <= MAX_NORM**2:  # No comparison with NaN is true.
            sum += gradient


def _let_go(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None, "this is called when it is there"
    return gradient
