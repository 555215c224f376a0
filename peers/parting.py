"""Ending what is under way when a peer is told to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Left(Exception):
    """The peer was told to leave before the work was done, which was ended. Not an error."""


async def until_left(leaving: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives or raises; Left when the peer is to leave before that."""
    doing, told = asyncio.ensure_future(work), asyncio.ensure_future(leaving.wait())
    try:
        await asyncio.wait((doing, told), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise Left
    finally:
        for each in (doing, told):
            each.cancel()
        await asyncio.gather(doing, told, return_exceptions=True)
