"""The sum of microbatches' gradients, added to while backward still runs.

Each parameter's is added as it is found, then let go: no microbatch's gradient is ever in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Layout, views_of
from swarmnet.model.sizes import MOST_NORM

Used = TypeVar("Used")


class GradientSum:
    """Of one stage. What it takes in is finite and bounded, whoever sent the microbatch."""

    def __init__(self, layout: Layout, device: torch.device, number: torch.dtype) -> None:
        self._number, self._device = number, device
        self.gather(layout)
        self._squares = torch.zeros((), device=device)
        """Of all numbers of the gradient at hand, as far as backward has come; of a processor's there is
        `_squares_here`: four small tensors for each parameter took longer than adding its gradient."""
        self._squares_here = 0.0

    def gather(self, layout: Layout) -> None:
        """Sum the gradients of these parameters from now on, and begin anew; what backward finds of others
        is dropped."""
        self._flat = torch.zeros(layout.size, dtype=self._number, device=self._device)
        self._views = views_of(self._flat, layout)

    def follows(self, name: str) -> bool:
        return name in self._views

    def follow(self, name: str, leaf: Tensor) -> None:
        """Add what backward finds for this leaf, which is the parameter `name`."""
        self._hook(lambda: self._views.get(name), _let_go, leaf)

    def follow_rows(self, start: int, stop: int, leaf: Tensor, let_go: Callable[[Tensor], Tensor]) -> None:
        """Add what is found for a leaf to this part of the sum. `let_go`: takes it out of the leaf."""
        self._hook(lambda: self._flat[start:stop], let_go, leaf)

    def _hook(
        self, place: Callable[[], Tensor | None], let_go: Callable[[Tensor], Tensor], leaf: Tensor
    ) -> None:
        take = partial(self._take, place, let_go)
        leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def add_gradient_of(self, loss: Tensor, leaves: list[Tensor]) -> bool:
        """Run backward; whether the gradient was finite and small enough to be summed. Else what was found
        after the number that was not is left out."""
        self.begin()
        torch.autograd.backward(loss, inputs=leaves)
        return self.was_within(lambda squares: squares)

    def begin(self) -> None:
        """With the gradient of a microbatch."""
        self._squares_here = 0.0
        self._squares.zero_()

    def was_within(self, total: Callable[[Tensor], Tensor]) -> bool:
        """Whether it was finite and small enough; `total` of what several devices found."""
        squares = total(self._squares + self._squares_here)
        return squares.item() <= MOST_NORM**2  # The one wait for the device.

    def use(self, use: Callable[[Tensor], Used]) -> Used:
        """What `use` makes of the sum since the last call: [layout.size], zero in the padding, and
        zero again afterwards, whatever comes of it."""
        try:
            return use(self._flat)
        finally:
            self._flat.zero_()

    def _take(
        self, place: Callable[[], Tensor | None], let_go: Callable[[Tensor], Tensor], leaf: Tensor
    ) -> None:
        gradient, sum = let_go(leaf), place()
        if sum is None:  # Its graph is older than what is gathered now.
            return
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        if gradient.device.type != "cpu":  # Where asking would wait for the device.
            self._squares.addcmul_(norm, norm)
            sum += torch.where(self._squares <= MOST_NORM**2, gradient, 0)
            return
        found = norm.item()
        self._squares_here += found * found
        if self._squares_here <= MOST_NORM**2:  # No comparison with NaN is true.
            sum += gradient


def _let_go(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None, "this is called when it is there"
    return gradient
