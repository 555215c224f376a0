"""The run owner's orders as a starting worker needs them: before its stage and its links are known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from peers.network.orders.exclusion import first_look
from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from peers.network.orders.republish import keep_forever
from peers.worker.pipeline.origin import MicrobatchSource
from peers.worker.worker_context import WorkerContext
from protocols.signed.invites import prove_invite
from swarmnet.run.owner_orders import NO_ORDER, describe_changes

LoadText = Callable[[frozenset[bytes]], Awaitable[MicrobatchSource]]
"""Loads the run's text without the documents of these hashes."""


class RunOrders:
    """Keeps the newest order, decides by it whom the run admits, and reads the text that it permits."""

    def __init__(self, context: WorkerContext, load_text: LoadText) -> None:
        self._context = context
        self._load_text = load_text
        settings, presence = context.settings, context.presence
        self.book = OrderBook(
            signed=context.signed, kept=settings.orders, log_event=context.log_event, notify=context.notify
        )
        for document in settings.heard_orders:
            self.book.take(document)
        shown = prove_invite(settings.invite, context.signed.run_id, presence.identity.peer_id)
        self.gatekeeper = Gatekeeper(self.book, shown, presence.directory.now)
        self.text: MicrobatchSource | None = None
        """The run's text; None on stages after the first."""
        self._withdrawn: frozenset[bytes] = frozenset()
        """Hashes of the documents that were withdrawn when `text` was read."""

    @property
    def last_round(self) -> int | None:
        """The last round that the owner ordered; None if no end is ordered."""
        return self.book.order.ends

    @property
    def paused(self) -> bool:
        return self.book.order.paused

    @property
    def text_is_stale(self) -> bool:
        """Whether documents were withdrawn since the text was read."""
        return self._withdrawn != self.book.order.documents()

    async def first_look(self, deadline_seconds: float) -> None:
        """Look the order up in the directory before anything starts. Raises UserError if this peer may not
        take part."""
        context = self._context
        directory = context.presence.directory
        await first_look(
            self.book, self.gatekeeper, directory, context.me, deadline_seconds, context.log_event
        )
        if self.book.order.sequence:
            now = "; ".join(describe_changes(NO_ORDER, self.book.order))
            context.notify("order", f"the newest order: {now}")

    async def read_text(self) -> None:
        """Read the run's text; called for the first stage."""
        self._withdrawn = self.book.order.documents()
        self.text = await self._load_text(self._withdrawn)

    async def keep_forever(self) -> None:
        """Keep order and registry entry published in the directory, and read newer ones, until cancelled."""
        await keep_forever(self.book, self._context.presence.directory, self._context.log_event)
