"""Give an order to a run: based on the newest known order, signed, stored, and sent to live peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.network.discovery.record_reader import opened
from peers.network.discovery.visitor_session import RunConnection
from peers.network.orders.order_book import OrderBook
from peers.telemetry.log_events import Notify
from protocols.errors import TooLarge, WireError
from protocols.messages.table import OrderUpdate
from protocols.signed.identity import Identity
from protocols.signed.orders import SignedOrder, seal_order
from protocols.signed.records import SignedRecord
from swarmnet.run.owner_orders import NO_ORDER, OrderError, OwnerOrders, next_sequence

Change = Callable[[OwnerOrders], OwnerOrders]
"""Changes the previous orders into the new ones. Raises OrderError for a change that makes no sense."""
DIRECTORY_SECONDS = 15.0
DIAL_SECONDS = 8.0
MAX_TOLD = 4
"""Maximum peers of each stage that get an order directly; they pass it on."""


@dataclass(frozen=True, slots=True)
class OrderState:
    """Orders that are known before the next one is given."""

    book: OrderBook
    """Newest order; newer than the directory's if the last one reached no peer."""
    public: OwnerOrders
    """Orders that the directory has."""


@dataclass(frozen=True, slots=True)
class Given:
    order: SignedOrder
    before: OwnerOrders
    """Orders that the directory had before."""
    stored: bool
    """Whether some node of the directory stored the order."""
    told: int
    """Number of peers that accepted the order."""


def check_owner(signed: SignedManifest, identity: Identity, key: Path) -> None:
    """Raise UserError unless the key is the run owner's."""
    if identity.peer_id != signed.manifest.owner:
        raise UserError(
            f"{key} is the key of {identity.peer_id}, but the run's owner is {signed.manifest.owner}: "
            "name the key with which it was published (--key)"
        )


async def newest(found: RunConnection, kept: Path | None, notify: Notify) -> OrderState:
    """Return the newest orders that the directory and this machine (`kept`) know. Raises WireError."""
    book = OrderBook(signed=found.signed, kept=kept, log_event=lambda *_, **__: None, notify=notify)
    run, owner = found.signed.run_id, found.signed.manifest.owner
    there = await found.directory.get_order(run, owner, DIRECTORY_SECONDS)
    if there is not None:
        book.accept(there)
    return OrderState(book, there.order if there is not None else NO_ORDER)


async def give(found: RunConnection, identity: Identity, known: OrderState, change: Change) -> Given:
    """Sign, store and send an order. Raises UserError if it makes no sense or is too large, and WireError if
    no peer is reached."""
    order = _only_kept(known, change)
    if order is None:
        order = _sealed(found, identity, known.book.order, change)
        known.book.accept(order)
    stored = await found.directory.put_order(found.signed.run_id, order.data, DIRECTORY_SECONDS)
    return Given(order, known.public, stored, await _publish(found, order))


def _only_kept(known: OrderState, change: Change) -> SignedOrder | None:
    """Return this machine's order if it has the same content and never reached the directory. It is then sent
    again instead of signing a new one."""
    said_already = _makes_sense(change, known.public) and not _makes_sense(change, known.book.order)
    return known.book.held if said_already else None


def _makes_sense(change: Change, order: OwnerOrders) -> bool:
    try:
        change(order)
    except OrderError:
        return False
    return True


def _sealed(found: RunConnection, identity: Identity, before: OwnerOrders, change: Change) -> SignedOrder:
    """Return the signed order after `before`. Raises UserError."""
    try:
        changed = change(before)
        sequence = next_sequence(before, found.directory.now())
        return seal_order(identity, found.signed.run_id, replace(changed, sequence=sequence))
    except OrderError as error:
        raise UserError(str(error)) from None
    except TooLarge as error:
        raise UserError(f"{error}: shorten the reasons, or lift bans that no longer matter") from None


async def _publish(found: RunConnection, order: SignedOrder) -> int:
    stages = range(len(found.signed.manifest.stages))
    groups = await asyncio.gather(*(_records(found, stage) for stage in stages))
    told = [_is_published(found, record, order) for group in groups for record in group[:MAX_TOLD]]
    return sum(await asyncio.gather(*told))


async def _records(found: RunConnection, stage: int) -> list[SignedRecord]:
    run = found.signed.run_id
    try:
        records = await found.directory.look_up(run, stage, DIRECTORY_SECONDS)
    except WireError:
        return []
    return sorted(opened(records.values(), run), key=lambda signed: -signed.sequence)


async def _is_published(found: RunConnection, record: SignedRecord, order: SignedOrder) -> bool:
    try:
        link = await found.transport.open(record.peer, "group", DIAL_SECONDS, record.record.addresses)
        link.post(OrderUpdate(order.data))
        await link.drained(0, DIAL_SECONDS)
        link.close()
    except WireError:
        return False
    return True
