"""The newest order of a run's owner, as this peer knows it: on disk, and told to whom it concerns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.run_file import SignedManifest
from peers.errors import UserError
from peers.telemetry import events as noted
from peers.telemetry.events import Say
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.orders import SignedOrder, open_order
from swarmnet.run.owner_orders import NO_ORDER, Order

Heard = Callable[[Order, Order], None]
"""(order before, order now)."""


class OrderBook:
    def __init__(self, signed: SignedManifest, kept: Path | None, note: noted.Note, say: Say) -> None:
        """`kept`: where the order survives a restart; None: nowhere."""
        self.signed = signed
        self.kept = kept
        self.note = note
        self.say = say
        self.held: SignedOrder | None = None
        self.heard: list[Heard] = []
        """Called when a newer order has come."""
        self._read()

    @property
    def order(self) -> Order:
        return self.held.order if self.held is not None else NO_ORDER

    def take(self, data: bytes) -> bool:
        """An order from anybody; whether it is news. Raises WireError for what is not the owner's."""
        if self.held is not None and data == self.held.data:
            return False
        return self.accept(open_order(data, self.signed.run_id, self.signed.manifest.owner))

    async def look_up(self, directory: Directory, deadline_seconds: float) -> None:
        """Take what the directory has. Raises WireError if it does not answer."""
        found = await directory.get_order(self.signed.run_id, self.signed.manifest.owner, deadline_seconds)
        if found is not None:
            self.accept(found)

    def accept(self, order: SignedOrder) -> bool:
        """A verified one."""
        if order.owner != self.signed.manifest.owner or not order.newer_than(self.held):
            return False
        before, self.held = self.order, order
        self._write(order.data)
        self.note(noted.Order(sequence=order.order.sequence, reason=order.order.reason))
        for heard in tuple(self.heard):
            heard(before, order.order)
        return True

    def _read(self) -> None:
        """From an earlier life. A damaged file is as good as none: the swarm has it."""
        if self.kept is None:
            return
        try:
            self.take(self.kept.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, WireError) as error:
            self.note(noted.OrderUnusable(reason=str(error)))
            self.say("order_unusable", f"the order kept in {self.kept} cannot be used: {error}")

    def _write(self, data: bytes) -> None:
        if self.kept is None:
            return
        try:
            write_atomically(self.kept, data)
        except UserError as error:  # A full disk: the order holds all the same.
            self.say("order_not_kept", str(error))
