"""Check whether the run's owner lets this peer take part, before it starts and while it runs.

The owner signs orders, which ban peers and revoke invites. Only the newest order counts."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from peers.telemetry import log_events
from protocols.errors import WireError
from protocols.ports import Directory
from swarmnet.identifiers import PeerId
from swarmnet.run.owner_orders import OwnerOrders

CHECK_SECONDS = 60.0
"""Interval of the checks in seconds. An invite expires without a message; new links are then refused."""


async def first_look(
    book: OrderBook,
    gatekeeper: Gatekeeper,
    directory: Directory,
    me: PeerId,
    deadline_seconds: float,
    log_event: log_events.LogEvent,
) -> None:
    """Get the newest order from the directory once, before anything starts. If the directory does not answer,
    that is only logged. Raises UserError if the newest order known here excludes this peer, `me`."""
    try:
        await book.look_up(directory, deadline_seconds)
    except WireError as error:
        log_event(log_events.OrderUnknown(reason=str(error)))
    gatekeeper.check_self(me)


async def until_excluded(book: OrderBook, gatekeeper: Gatekeeper, me: PeerId) -> None:
    """Check at each new order, and once in `CHECK_SECONDS`, until cancelled. Raises UserError if the owner
    excludes this peer, `me`. A refusal by another peer does not count: any peer can refuse any other."""
    order_arrived = asyncio.Event()

    def on_order(before: OwnerOrders, now: OwnerOrders) -> None:
        order_arrived.set()

    book.heard.append(on_order)
    try:
        while True:
            order_arrived.clear()
            gatekeeper.check_self(me)
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await order_arrived.wait()
    finally:
        book.heard.remove(on_order)
