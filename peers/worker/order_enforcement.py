"""Pass the owner's orders on to other peers and carry them out on this one.

Sets of contributions that are still open are left as they are. A banned peer loses its links, and its
contributions to later rounds are rejected (swarmnet/rounds/contributors.py). Contributions that some peer
accepted before stay, because all peers have to agree on the same sets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from peers.errors import UserError
from peers.network.message_router import handles
from peers.network.orders.exclusion import first_look
from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from peers.network.orders.republish import keep_forever
from peers.worker.pipeline.pipeline_service import MicrobatchSource
from peers.worker.run_end import RunShutdown
from peers.worker.worker_context import WorkerContext
from protocols.errors import WireError
from protocols.messages.table import OrderUpdate
from protocols.signed.invites import prove_invite
from swarmnet.identifiers import PeerId
from swarmnet.run.owner_orders import NO_ORDER, OwnerOrders, describe_changes

LoadText = Callable[[frozenset[bytes]], Awaitable[MicrobatchSource]]
"""Loads the run's text without the documents of these hashes."""


class OrderEnforcer:
    """Carries out the owner's orders; built with the worker, started by `begin()` once its parts exist."""

    def __init__(
        self,
        *,
        worker: WorkerContext,
        book: OrderBook,
        ending: RunShutdown,
        invite: bytes,
        load_text: LoadText,
        task_ended: Callable[[asyncio.Task[None]], None],
        stands: Callable[[], None],
    ) -> None:
        """`task_ended` receives failed tasks; `stands()` is called when the run may be paused or resumed."""
        self.worker = worker
        self.ending = ending
        self.task_ended = task_ended
        self.stands = stands
        self.book = book
        presence = worker.presence
        shown = prove_invite(invite, book.signed.run_id, presence.identity.peer_id)
        self.gatekeeper = Gatekeeper(book, shown, presence.directory.now)
        self.load_text = load_text
        self._text: MicrobatchSource | None = None
        self._loaded: frozenset[bytes] = frozenset()
        """Hashes of the documents that were withdrawn when `_text` was read."""
        self._reading: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None

    @property
    def paused(self) -> bool:
        return self.book.order.paused

    async def first_look(self, deadline_seconds: float) -> None:
        """Look the order up in the directory before anything starts. Raises UserError if this peer may not
        take part."""
        worker, directory = self.worker, self.worker.presence.directory
        me = worker.transport.peer
        await first_look(self.book, self.gatekeeper, directory, me, deadline_seconds, worker.log_event)
        if self.book.order.sequence:
            now = "; ".join(describe_changes(NO_ORDER, self.book.order))
            self.worker.notify("order", f"the owner's newest order: {now}")

    async def read_text(self) -> MicrobatchSource:
        """Read the run's text; called for the first stage."""
        self._loaded = self.book.order.documents()
        self._text = await self.load_text(self._loaded)
        return self._text

    def begin(self) -> None:
        """Start to enforce orders. Called when the worker's parts are assembled."""
        self.book.heard.append(self._on_order)
        self._bar()
        self.steer()

    async def keep_forever(self) -> None:
        """Keep the order and the registry entry published in the directory, and read newer ones, until
        cancelled."""
        await keep_forever(self.book, self.worker.presence.directory, self.worker.log_event)

    async def close(self) -> None:
        if self._on_order in self.book.heard:
            self.book.heard.remove(self._on_order)
        tasks = [task for task in (self._reading, self._saving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- neighbours -----------------------------------------------------------------------------------

    def linked(self, peer: PeerId) -> None:
        self._send_order(peer)

    def on_state_request(self, peer: PeerId) -> None:
        """Send the order to a peer that requests the state but has no link on which it got the order."""
        neighbourhood, held = self.worker.neighbourhood, self.book.held
        if held is not None and neighbourhood is not None and peer not in neighbourhood.known():
            neighbourhood.answer(peer, "group", OrderUpdate(held.data))

    @handles(OrderUpdate)
    def message(self, peer: PeerId, message: OrderUpdate, _body: bytes) -> None:
        """Accept an order from any peer, also before its handshake is complete."""
        neighbourhood = self.worker.neighbourhood
        assert neighbourhood is not None
        held = self.book.held
        try:
            news = self.book.take(message.order)
        except WireError as error:
            neighbourhood.refused(peer, error.code, str(error))
            return
        if not news and held is not None and message.order != held.data:
            self._send_order(peer)  # The peer has an older order. A peer without a link gets no reply.

    def _send_order(self, peer: PeerId) -> None:
        neighbourhood, held = self.worker.neighbourhood, self.book.held
        if held is not None and neighbourhood is not None:
            neighbourhood.post(peer, "group", OrderUpdate(held.data))

    # -- enforcing ------------------------------------------------------------------------------------

    def _on_order(self, before: OwnerOrders, now: OwnerOrders) -> None:
        """Apply a new order of the run's owner: pass it on, part from excluded peers, set rates, and start or
        stop. `before` and `now` are the previous and the new order."""
        worker = self.worker
        reason = now.reason or "no reason given"
        changes = "; ".join(describe_changes(before, now))
        worker.notify("order", f"new order of the owner: {changes} ({reason})")
        neighbourhood = worker.neighbourhood
        assert neighbourhood is not None
        for peer, known in list(neighbourhood.membership.peers.items()):
            if known.linked:
                self._send_order(peer)
        self._bar()
        for peer, (code, reason) in self.gatekeeper.parted().items():
            neighbourhood.part_from(peer, code, reason)
        try:
            self.gatekeeper.check_self(worker.transport.peer)
        except UserError as error:
            if not worker.compute.failed.done():
                worker.compute.failed.set_result(error)
            return
        if worker.update is not None:
            worker.update.ordered(now.rates)
        self.ending.on_change()
        self.steer()
        if now.checkpoint > before.checkpoint:
            self._saving = asyncio.get_running_loop().create_task(self._save(), name="ordered checkpoint")
            self._saving.add_done_callback(self.task_ended)
        self.stands()

    def _bar(self) -> None:
        """Reject the contributions of excluded peers from now on."""
        update = self.worker.update
        current = update.rounds.current if update is not None else -1
        self.worker.contributors.bar(self.gatekeeper.parted(), current)

    def steer(self) -> None:
        """Allow or stop new microbatches, depending on the order and on the text that may be read."""
        data = self.worker.data
        if data is None or self._text is None:
            return
        stale = self._loaded != self.book.order.documents()
        data.text = None if self.paused or stale or self.ending.starts_nothing else self._text
        if stale and (self._reading is None or self._reading.done()):
            self._reading = asyncio.get_running_loop().create_task(self._read_again(), name="read text again")
            self._reading.add_done_callback(self.task_ended)
        data.pump()

    async def _read_again(self) -> None:
        """Read the text again after documents were withdrawn; no microbatch starts until that is done."""
        while self._loaded != self.book.order.documents():
            await self.read_text()
        self.steer()

    async def _save(self) -> None:
        """Save the newest settled weights."""
        update = self.worker.update
        if update is not None:
            await self.worker.disk.save(update.settled_weights)
