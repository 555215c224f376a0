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
from swarmnet.identifiers import PeerId
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
    """Newest orders; newer than the directory's if the last one reached no peer."""
    directory: OrderBook
    """Orders that the directory has."""
    author: PeerId
    """The author of the next one: the owner, or the moderators' joint id."""

    @property
    def newest(self) -> OwnerOrders:
        """The author's newest orders."""
        return _orders_of(self.book.held_of(self.author))

    @property
    def public(self) -> OwnerOrders:
        """The author's orders in the directory."""
        return _orders_of(self.directory.held_of(self.author))


def _orders_of(held: SignedOrder | None) -> OwnerOrders:
    return held.order if held is not None else NO_ORDER


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


async def newest(
    found: RunConnection, kept: Path | None, notify: Notify, author: PeerId | None = None
) -> OrderState:
    """Return the newest orders that the directory and this machine (`kept`) know. `author`: who gives the
    next one; None: the owner. Raises WireError."""
    book = OrderBook(signed=found.signed, kept=kept, log_event=lambda *_, **__: None, notify=notify)
    there = OrderBook(signed=found.signed, kept=None, log_event=lambda *_, **__: None, notify=notify)
    await there.look_up(found.directory, DIRECTORY_SECONDS)
    for document in there.documents:
        book.take(document)
    return OrderState(book, there, author or found.signed.manifest.owner)


async def give(found: RunConnection, identity: Identity, known: OrderState, change: Change) -> Given:
    """Sign, store and send an order. Raises UserError if it makes no sense or is too large, and WireError if
    no peer is reached."""
    order = _only_kept(known, change)
    if order is None:
        order = _sealed(found, identity, known.newest, change)
        known.book.accept(order)
    return await send(found, order, known.public)


async def send(found: RunConnection, order: SignedOrder, before: OwnerOrders) -> Given:
    """Store a signed order in the directory and send it to live peers. `before`: its author's orders so
    far."""
    stored = await found.directory.put_order(found.signed.run_id, order.data, DIRECTORY_SECONDS)
    return Given(order, before, stored, await _publish(found, order))


def _only_kept(known: OrderState, change: Change) -> SignedOrder | None:
    """Return this machine's order if it has the same content and never reached the directory. It is then sent
    again instead of signing a new one."""
    held = known.book.held
    said_already = (
        held is not None and _makes_sense(change, known.public) and not _makes_sense(change, held.order)
    )
    return held if said_already else None


def _makes_sense(change: Change, order: OwnerOrders) -> bool:
    try:
        change(order)
    except OrderError:
        return False
    return True


def changed(before: OwnerOrders, change: Change, now_seconds: float) -> OwnerOrders:
    """Return the orders after `before`, with the sequence of this time. Raises UserError if the change makes
    no sense."""
    try:
        return replace(change(before), sequence=next_sequence(before, now_seconds))
    except OrderError as error:
        raise UserError(str(error)) from None


def _sealed(found: RunConnection, identity: Identity, before: OwnerOrders, change: Change) -> SignedOrder:
    """Return the signed order after `before`. Raises UserError."""
    try:
        return seal_order(identity, found.signed.run_id, changed(before, change, found.directory.now()))
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
