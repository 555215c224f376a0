"""Keep the newest orders of a run's owner and moderators, in memory and on disk, and notify those concerned.

An order is signed and numbered; it bans peers, revokes invites or pauses the run. The newest one of each
counts. Moderators only ban peers, by a document that several of them have signed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.orders import SignedOrder
from protocols.signed.stored_orders import authors_of, open_order_of
from swarmnet.identifiers import PeerId
from swarmnet.run.owner_orders import NO_ORDER, OwnerOrders

Heard = Callable[[OwnerOrders, OwnerOrders], None]
"""Called with (order before, order now)."""


class OrderBook:
    """Holds the newest order that this peer knows."""

    def __init__(
        self, *, signed: SignedManifest, kept: Path | None, log_event: log_events.LogEvent, notify: Notify
    ) -> None:
        """Create the book. `kept` is the file in which the order survives a restart, or None."""
        self.signed = signed
        self.kept = kept
        self.log_event = log_event
        self.notify = notify
        self.order = NO_ORDER
        """The owner's newest order with the bans by moderators."""
        self.authors = authors_of(signed.manifest)
        """The owner and, if there are any, the moderators."""
        self._held: dict[PeerId, SignedOrder] = {}
        self.heard: list[Heard] = []
        """Called when a newer order has arrived."""
        self._read()

    @property
    def held(self) -> SignedOrder | None:
        """The owner's newest order, as signed."""
        return self.held_of(self.signed.manifest.owner)

    def held_of(self, author: PeerId) -> SignedOrder | None:
        """Return the author's newest order, as signed."""
        return self._held.get(author)

    @property
    def documents(self) -> list[bytes]:
        """The signed bytes of all that is held."""
        return [held.data for held in self._held.values()]

    def take(self, data: bytes) -> bool:
        """Verify and `accept` an order. Returns True if it was adopted. Raises WireError if it is invalid."""
        if data in self.documents:
            return False
        return self.accept(open_order_of(self.signed.manifest, self.signed.run_id, data))

    def take_archived(self, documents: Iterable[bytes], archive_url: str) -> None:
        """Accept the orders from an archive that are newer. An invalid one is reported."""
        for data in documents:
            try:
                self.take(data)
            except WireError as error:
                self.notify("order_unusable", f"{archive_url}: an order in it is refused: {error}")

    async def look_up(self, directory: Directory, deadline_seconds: float) -> None:
        """Accept the orders in the directory that are newer. Raises WireError if there is no answer."""
        run = self.signed.run_id
        looks = (directory.get_order(run, author, deadline_seconds) for author in self.authors)
        for found in await asyncio.gather(*looks):
            if found is not None:
                self.accept(found)

    def accept(self, order: SignedOrder) -> bool:
        """Adopt a verified order of the owner or the moderators if it is newer: store it and call the
        functions in `heard`. Returns True if it was adopted."""
        if order.owner not in self.authors or not order.newer_than(self.held_of(order.owner)):
            return False
        manifest, returned = self.signed.manifest, order.order.returned
        if returned is not None and (manifest.data.private or len(returned.points) != len(manifest.stages)):
            return False  # The privacy budget counts each round once.
        before, owner = self.order, manifest.owner
        self._held[order.owner] = order
        moderated = [held.order for author, held in self._held.items() if author != owner]
        own = self.held.order if self.held is not None else NO_ORDER
        self.order = own.with_bans_of(moderated[0] if moderated else None, owner)
        self._write(order)
        self.log_event(log_events.Order(sequence=order.order.sequence, reason=order.order.reason))
        for on_order in tuple(self.heard):
            on_order(before, self.order)
        return True

    def _read(self) -> None:
        """Load the orders that an earlier process stored, if there are any. A damaged file is reported and
        counts as missing, because other peers have the order."""
        for path in map(self._file_of, self.authors):
            if path is None:
                return
            try:
                self.take(path.read_bytes())
            except FileNotFoundError:
                pass
            except (OSError, WireError) as error:
                self.log_event(log_events.OrderUnusable(reason=str(error)))
                self.notify("order_unusable", f"the order kept in {path} cannot be used: {error}")

    def _file_of(self, author: PeerId) -> Path | None:
        """Return the file in which the author's order survives a restart."""
        if self.kept is None or author == self.signed.manifest.owner:
            return self.kept
        return self.kept.with_name(f"moderated-{self.kept.name}")

    def _write(self, order: SignedOrder) -> None:
        """Store the order on disk, if there is a file for it. A failure is reported to the user only."""
        path = self._file_of(order.owner)
        if path is None:
            return
        try:
            write_atomically(path, order.data)
        except UserError as error:  # The disk is full: the order still applies.
            self.notify("order_not_kept", str(error))
