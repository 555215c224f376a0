"""Waiting for a store that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from peers.archive.store import StoreUnreachable

Result = TypeVar("Result")
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
"""Between attempts; twice as long each time."""


async def until_reached(attempt: Callable[[], Awaitable[Result]], say: Callable[[str, str], None]) -> Result:
    """What it gives once the store answers; what cannot become otherwise is raised."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await attempt()
        except StoreUnreachable as error:
            say("archive", f"{error}; trying again in {pause:.0f} s (Ctrl+C stops)")
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
