"""Pass the owner's orders on to other peers and carry them out on this one.

A ban leaves open sets of contributions as they are. A banned peer loses its links, and its contributions to
later rounds are rejected (swarmnet/rounds/contributors.py). A roll-back also takes its contributions out of
the rounds that have not settled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from peers.config.errors import UserError
from peers.network.message_router import handles
from peers.worker.run_end import RunShutdown
from peers.worker.run_orders import RunOrders
from peers.worker.stage_services import StageServices
from protocols.errors import WireError
from protocols.messages.table import OrderUpdate
from swarmnet.identifiers import PeerId
from swarmnet.run.owner_orders import OwnerOrders, describe_news

READ_TEXT = "read text again"


class OrderEnforcer:
    """Carries out the owner's orders in one stage."""

    def __init__(
        self, *, services: StageServices, orders: RunOrders, ending: RunShutdown, stands: Callable[[], None]
    ) -> None:
        """`stands()` is called when the run may be paused or resumed."""
        self._services = services
        self._orders = orders
        self._ending = ending
        self._stands = stands
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The newest task of each kind: reading the text again, saving a checkpoint."""

    def begin(self) -> None:
        """Start to enforce orders."""
        self._orders.book.heard.append(self._on_order)
        self._bar()
        self.steer()

    async def close(self) -> None:
        heard = self._orders.book.heard
        if self._on_order in heard:
            heard.remove(self._on_order)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # -- neighbours -----------------------------------------------------------------------------------

    def linked(self, peer: PeerId) -> None:
        self._send_order(peer)

    def on_state_request(self, peer: PeerId) -> None:
        """Send the order to a peer that requests the state but has no link on which it got the order."""
        links = self._services.links
        for document in self._orders.book.documents if peer not in links.known() else ():
            links.answer(peer, "group", OrderUpdate(document))

    @handles(OrderUpdate)
    def message(self, peer: PeerId, message: OrderUpdate, _body: bytes) -> None:
        """Accept an order from any peer, also before its handshake is complete."""
        book = self._orders.book
        try:
            news = book.take(message.order)
        except WireError as error:
            self._services.links.refused(peer, error.code, str(error))
            return
        if not news and message.order not in book.documents:
            self._send_order(peer)  # The peer has an older order. A peer without a link gets no reply.

    def _send_order(self, peer: PeerId) -> None:
        for document in self._orders.book.documents:
            self._services.links.post(peer, "group", OrderUpdate(document))

    # -- enforcing ------------------------------------------------------------------------------------

    def _on_order(self, before: OwnerOrders, now: OwnerOrders) -> None:
        """Apply a new order of the run's owner: pass it on, part from excluded peers, set rates, and start or
        stop. `before` and `now` are the previous and the new order."""
        services, gatekeeper = self._services, self._orders.gatekeeper
        services.context.notify("order", f"new order: {describe_news(before, now)}")
        for peer in services.linked():
            self._send_order(peer)
        self._bar()
        for peer, (code, reason) in gatekeeper.parted().items():
            services.links.part_from(peer, code, reason)
        try:
            gatekeeper.check_self(services.context.me)
        except UserError as error:
            services.context.end_with(error)
            return
        lineage = now.lineage(services.stage)
        if lineage != services.lineage:
            services.return_to(lineage)
            return  # The next worker carries out the rest.
        services.round_service.roll_back(now.rolled_back())
        services.round_service.ordered(now.rates)
        self._ending.on_change()
        self.steer()
        if now.checkpoint > before.checkpoint:
            self._begin("ordered checkpoint", self._save())
        self._stands()

    def _bar(self) -> None:
        """Reject the contributions of excluded peers from now on."""
        service = self._services.round_service
        current, settled = (
            (service.rounds.current, service.rounds.settled) if service.has_weights else (-1, -1)
        )
        rolled_back = self._orders.book.order.rolled_back()
        self._services.contributors.bar(self._orders.gatekeeper.parted(), current, rolled_back, settled)

    def steer(self) -> None:
        """Allow or stop new microbatches, depending on the order and on the text that may be read."""
        orders, pipeline = self._orders, self._services.pipeline_service
        if orders.text is None:
            return
        stopped = orders.paused or orders.text_is_stale or self._ending.starts_nothing
        pipeline.origin.text = None if stopped else orders.text
        pipeline.origin.mixtures = orders.book.order.mixtures
        reading = self._tasks.get(READ_TEXT)
        if orders.text_is_stale and (reading is None or reading.done()):
            self._begin(READ_TEXT, self._read_again())
        pipeline.pump()

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` as a task that ends the worker if it fails."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._services.context.task_ended)
        self._tasks[name] = task

    async def _read_again(self) -> None:
        """Read the text again after documents were withdrawn; no microbatch starts until that is done."""
        while self._orders.text_is_stale:
            await self._orders.read_text()
        self.steer()

    async def _save(self) -> None:
        """Save the newest settled weights."""
        service = self._services.round_service
        if service.has_weights:
            await self._services.disk.save(service.settled_weights)
