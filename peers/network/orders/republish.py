"""Keep a run's entries in the DHT alive: the owner's order and the registry entry, which lists the run.

A DHT forgets an entry that is not stored again."""

from __future__ import annotations

import asyncio

from peers.network.orders.order_book import OrderBook
from peers.telemetry import log_events
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.identity import SIGNATURE_BYTES
from protocols.signed.registry_entry import seal_listing

UPKEEP_SECONDS = 60.0
"""Interval in seconds. A stored order and entry live 600 s, so nine in a row may be lost."""
OPERATION_SECONDS = 10.0


async def keep_forever(book: OrderBook, directory: Directory, log_event: log_events.LogEvent) -> None:
    """Republish in regular intervals, and accept newer orders."""
    while True:
        await keep(book, directory, log_event)
        await asyncio.sleep(UPKEEP_SECONDS)


async def keep(book: OrderBook, directory: Directory, log_event: log_events.LogEvent) -> None:
    """Accept the orders in the directory that are newer. Store the newest orders again, and the registry
    entry if the run is listed. If the directory does not answer, that is only logged."""
    signed = book.signed
    try:
        await book.look_up(directory, OPERATION_SECONDS)
        for document in book.documents:
            await directory.put_order(signed.run_id, document, OPERATION_SECONDS)
        if signed.manifest.listed:
            signature = signed.wire()[-SIGNATURE_BYTES:]
            entry = seal_listing(signed.run_id, signed.manifest.owner, signature)
            await directory.put_listing(entry, OPERATION_SECONDS)
    except WireError as error:
        log_event(log_events.UpkeepFailed(code=error.code, reason=str(error)))
