"""Tests that live on the virtual clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine

from peers.lab.world.virtual_time import run


def on_virtual_clock(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """The test on an event loop of its own, whose clock jumps to whatever is due next."""

    @functools.wraps(test)
    def lived(*arguments: object, **fixtures: object) -> None:
        run(test(*arguments, **fixtures))

    return lived
