"""Check whether the run's owner lets this peer take part, before it starts and while it runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from peers.telemetry import events as events
from protocols.errors import WireError
from protocols.ports import Directory
from swarmnet.identifiers import PeerId
from swarmnet.run.owner_orders import OwnerOrders

CHECK_SECONDS = 60.0
"""Interval of the checks in seconds. An invite expires without any message. From then on, links that are
opened again are refused."""


async def first_look(
    book: OrderBook,
    gatekeeper: Gatekeeper,
    directory: Directory,
    me: PeerId,
    deadline_seconds: float,
    log_event: events.LogEvent,
) -> None:
    """Ask the directory for orders once before anything starts. Raises UserError if this peer is excluded."""
    try:
        await book.look_up(directory, deadline_seconds)
    except WireError as error:
        log_event(events.OrderUnknown(reason=str(error)))
    gatekeeper.check_self(me)


async def until_excluded(book: OrderBook, gatekeeper: Gatekeeper, me: PeerId) -> None:
    """Run until cancelled. Raises UserError as soon as this peer is excluded. A refusal by another peer does
    not count, because any peer can refuse any other. It comes with the order."""
    news = asyncio.Event()

    def on_order(before: OwnerOrders, now: OwnerOrders) -> None:
        news.set()

    book.heard.append(on_order)
    try:
        while True:
            news.clear()
            gatekeeper.check_self(me)
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await news.wait()
    finally:
        book.heard.remove(on_order)
