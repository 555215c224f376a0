"""What a microbatch costs here is measured once all peers train, and not before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from peers.errors import UserError
from peers.lab.planner import measure
from peers.lab.world.virtual_time import run


def peer(name: str, tokens: int = 0, alive: bool = True) -> SimpleNamespace:
    return SimpleNamespace(name=name, alive=alive, last_words="meets its group", status={"tokens": tokens})


def test_peers_are_waited_for_until_the_last_one_trains():
    async def story() -> None:
        loop = asyncio.get_running_loop()
        began, slow = loop.time(), peer("slow")
        loop.call_later(20.0, slow.status.update, {"tokens": 256})
        await measure._all_train([peer("quick", 256), slow])
        assert 20.0 <= loop.time() - began <= 21.0

    run(story())


@pytest.mark.parametrize(("alive", "why"), [(True, "did not begin to train within 24 s"), (False, "ended")])
def test_a_peer_that_never_trains_is_named_with_what_it_said_last(alive, why):
    async def story() -> None:
        with pytest.raises(UserError, match=f"late {why}: meets its group"):
            await measure._all_train([peer("quick", 256), peer("late", alive=alive)])

    run(story())
