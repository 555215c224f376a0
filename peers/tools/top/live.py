"""The swarm as the directory shows it, drawn again and again by a visitor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from rich.console import Console

from peers.network.discovery.record_reader import LOOK_UP_SECONDS, look
from peers.network.discovery.visitor_session import Reached
from peers.network.orders.order_book import OrderBook
from peers.telemetry.picture import Picture
from peers.tools.top import screen
from peers.tools.top.from_directory import Watch
from peers.tools.top.keys import Keys
from peers.tools.top.show import FRAME_SECONDS, LEAVE, framed, live
from protocols.errors import WireError
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId

DIRECTORY_SECONDS = 5.0
"""How often the directory is asked; records change every 30 s, or when a peer's state does."""


async def swarm(console: Console, found: Reached) -> None:
    """What the directory says of the run, again and again."""
    pictures = _looks(found)
    async with aclosing(pictures):
        if not console.is_terminal:
            console.print(screen.frame(await anext(pictures), console))
            return
        with Keys() as keys, live(console) as display:
            async for picture in pictures:
                until = time.monotonic() + DIRECTORY_SECONDS
                while time.monotonic() < until:
                    display.update(framed(picture, console, LEAVE), refresh=True)
                    if "q" in await asyncio.to_thread(keys.pressed, FRAME_SECONDS):
                        return


async def _looks(found: Reached) -> AsyncGenerator[Picture]:
    """Picture after picture; a directory that does not answer leaves the last one standing."""
    watch = Watch(found.signed.manifest)
    book = OrderBook(found.signed, None, lambda *_, **__: None, lambda *_: None)
    records = await _look(found, book)
    while True:
        yield watch.take(records, found.directory.now(), book.order)
        try:
            records = await _look(found, book)
        except WireError:
            continue


async def _look(found: Reached, book: OrderBook) -> dict[PeerId, SignedRecord]:
    """Both at once: who only looks should not wait twice."""
    stages = len(found.signed.manifest.stages)
    records, _ = await asyncio.gather(
        look(found.directory, found.signed.run_id, stages), _look_up_order(found, book)
    )
    return records


async def _look_up_order(found: Reached, book: OrderBook) -> None:
    with suppress(WireError):  # What was known before stands.
        await book.look_up(found.directory, LOOK_UP_SECONDS)
