"""Ending what is under way when a peer is told to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from peers.supervision import until_one_ends

Result = TypeVar("Result")


class Left(Exception):
    """The peer was told to leave before the work was done, which was ended. Not an error."""


async def until_left(leaving: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives or raises; Left when the peer is to leave before that."""
    given: list[Result] = []

    async def wait() -> None:
        given.append(await work)

    await until_one_ends(work=wait(), leaving=leaving.wait())
    if not given:
        raise Left
    return given[0]
