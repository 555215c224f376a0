"""Keep the newest order of a run's owner, in memory and on disk, and notify the parts that it concerns.

An order is signed and numbered; it bans peers, revokes invites or pauses the run. The newest one counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.orders import SignedOrder, open_order
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
        self.held: SignedOrder | None = None
        self.heard: list[Heard] = []
        """Called when a newer order has arrived."""
        self._read()

    @property
    def order(self) -> OwnerOrders:
        """The newest order, or `NO_ORDER`."""
        return self.held.order if self.held is not None else NO_ORDER

    def take(self, data: bytes) -> bool:
        """Verify and `accept` an order. Returns True if it was adopted. Raises WireError if it is invalid."""
        if self.held is not None and data == self.held.data:
            return False
        return self.accept(open_order(data, self.signed.run_id, self.signed.manifest.owner))

    async def look_up(self, directory: Directory, deadline_seconds: float) -> None:
        """Accept the order in the directory if it is newer. Raises WireError if there is no answer."""
        found = await directory.get_order(self.signed.run_id, self.signed.manifest.owner, deadline_seconds)
        if found is not None:
            self.accept(found)

    def accept(self, order: SignedOrder) -> bool:
        """Adopt a verified order of the owner if it is newer: store it and call the functions in `heard`.
        Returns True if it was adopted."""
        if order.owner != self.signed.manifest.owner or not order.newer_than(self.held):
            return False
        before = self.order
        self.held = order
        self._write(order.data)
        self.log_event(log_events.Order(sequence=order.order.sequence, reason=order.order.reason))
        for on_order in tuple(self.heard):
            on_order(before, order.order)
        return True

    def _read(self) -> None:
        """Load the order that an earlier process stored, if there is one. A damaged file is reported and
        counts as missing, because other peers have the order."""
        if self.kept is None:
            return
        try:
            self.take(self.kept.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, WireError) as error:
            self.log_event(log_events.OrderUnusable(reason=str(error)))
            self.notify("order_unusable", f"the order kept in {self.kept} cannot be used: {error}")

    def _write(self, data: bytes) -> None:
        """Store the order on disk, if there is a file for it. A failure is reported to the user only."""
        if self.kept is None:
            return
        try:
            write_atomically(self.kept, data)
        except UserError as error:  # The disk is full: the order still applies.
            self.notify("order_not_kept", str(error))
