"""What a worker does about the owner's orders: hands them on, and obeys.

Nothing of it touches the sets of contributions that are open: whoever was banned has no links any more, and
nothing that it makes for rounds some way ahead is taken from anybody (swarmnet/rounds/contributors.py), but
what some peer took before stays in the sets that all come to agree on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from peers.errors import UserError
from peers.network.orders.exclusion import first_look
from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from peers.network.orders.republish import keep_forever
from peers.worker.pipeline.pipeline_service import Text
from peers.worker.run_end import RunShutdown
from peers.worker.worker_context import WorkerContext
from protocols.errors import WireError
from protocols.messages.table import OrderUpdate
from protocols.signed.invites import prove_invite
from swarmnet.identifiers import PeerId
from swarmnet.run.owner_orders import NO_ORDER, Order, describe_changes

LoadText = Callable[[frozenset[bytes]], Awaitable[Text]]
"""The run's text without the documents of these hashes."""


class OrderEnforcer:
    """Made with the worker; `begin` when its parts are there."""

    def __init__(
        self,
        worker: WorkerContext,
        book: OrderBook,
        ending: RunShutdown,
        invite: bytes,
        load_text: LoadText,
        task_ended: Callable[[asyncio.Task[None]], None],
        stands: Callable[[], None],
    ) -> None:
        """`task_ended`: takes what fails; `stands()`: the run may have been paused, or go on."""
        self.worker = worker
        self.ending = ending
        self.task_ended, self.stands = task_ended, stands
        self.book = book
        presence = worker.presence
        shown = prove_invite(invite, book.signed.run_id, presence.identity.peer_id)
        self.gatekeeper = Gatekeeper(book, shown, presence.directory.now)
        self.load_text = load_text
        self._text: Text | None = None
        self._loaded: frozenset[bytes] = frozenset()
        """Withdrawn when `_text` was read."""
        self._reading: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None

    @property
    def paused(self) -> bool:
        return self.book.order.paused

    async def first_look(self, deadline_seconds: float) -> None:
        """Ask the directory once before anything starts. UserError if this peer is not to take part."""
        worker, directory = self.worker, self.worker.presence.directory
        me = worker.transport.peer
        await first_look(self.book, self.gatekeeper, directory, me, deadline_seconds, worker.log_event)
        if self.book.order.sequence:
            now = "; ".join(describe_changes(NO_ORDER, self.book.order))
            self.worker.notify("order", f"by the owner's newest order: {now}")

    async def read_text(self) -> Text:
        """For the first stage."""
        self._loaded = self.book.order.documents()
        self._text = await self.load_text(self._loaded)
        return self._text

    def begin(self) -> None:
        """The worker's parts are assembled."""
        self.book.heard.append(self._on_order)
        neighbourhood = self.worker.neighbourhood
        assert neighbourhood is not None
        neighbourhood.admission = self.gatekeeper
        self._bar()
        self.steer()

    async def keep_forever(self) -> None:
        """The order and the registry's entry in the directory, and what others have put there."""
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
        """It asks for the state: a visitor has no link on which it was told."""
        neighbourhood, held = self.worker.neighbourhood, self.book.held
        if held is not None and neighbourhood is not None and peer not in neighbourhood.known():
            neighbourhood.answer(peer, "group", OrderUpdate(held.data))

    def message(self, peer: PeerId, message: OrderUpdate) -> None:
        """From anybody, even from one who has not greeted."""
        neighbourhood = self.worker.neighbourhood
        assert neighbourhood is not None
        held = self.book.held
        try:
            news = self.book.take(message.order)
        except WireError as error:
            neighbourhood.refused(peer, error.code, str(error))
            return
        if not news and held is not None and message.order != held.data:
            self._send_order(peer)  # It knows an older one. Who has no link to us gets nothing.

    def _send_order(self, peer: PeerId) -> None:
        neighbourhood, held = self.worker.neighbourhood, self.book.held
        if held is not None and neighbourhood is not None:
            neighbourhood.post(peer, "group", OrderUpdate(held.data))

    # -- obeying --------------------------------------------------------------------------------------

    def _on_order(self, before: Order, now: Order) -> None:
        worker = self.worker
        reason = now.reason or "no reason given"
        worker.notify("order", f"the owner orders: {'; '.join(describe_changes(before, now))} ({reason})")
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
        """Whose contributions count no more."""
        update = self.worker.update
        current = update.rounds.current if update is not None else -1
        self.worker.contributors.bar(self.gatekeeper.parted(), current)

    def steer(self) -> None:
        """Start microbatches or not, from the text that may be read."""
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
        """Documents were withdrawn. Until the text is read without them, nothing of it is used."""
        while self._loaded != self.book.order.documents():
            await self.read_text()
        self.steer()

    async def _save(self) -> None:
        """The newest settled weights."""
        update = self.worker.update
        if update is not None:
            await self.worker.disk.save(update.settled_weights)
