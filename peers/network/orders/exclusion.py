"""Whether the run's owner lets this peer take part: looked at before it begins, and as long as it runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from peers.telemetry import events as noted
from protocols.errors import WireError
from protocols.ports import Directory
from swarmnet.identifiers import PeerId
from swarmnet.run.owner_orders import Order

CHECK_SECONDS = 60.0
"""An invite runs out without any news; whoever opens links again and again is refused from then on."""


async def first_look(
    book: OrderBook,
    gatekeeper: Gatekeeper,
    directory: Directory,
    me: PeerId,
    deadline_seconds: float,
    note: noted.Note,
) -> None:
    """Ask the directory once before anything starts. UserError if this peer is not to take part."""
    try:
        await book.look_up(directory, deadline_seconds)
    except WireError as error:
        note(noted.OrderUnknown(reason=str(error)))
    gatekeeper.check_self(me)


async def until_excluded(book: OrderBook, gatekeeper: Gatekeeper, me: PeerId) -> None:
    """Until it is cancelled. UserError as soon as this peer is not to take part any more.

    What others say of it does not count: anybody can refuse anybody. They send the order with their refusal.
    """
    news = asyncio.Event()

    def heard(before: Order, now: Order) -> None:
        news.set()

    book.heard.append(heard)
    try:
        while True:
            news.clear()
            gatekeeper.check_self(me)
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await news.wait()
    finally:
        book.heard.remove(heard)
