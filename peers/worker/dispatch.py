"""Dispatch what the peer links report (messages, new and lost links) to the part of the worker concerned."""

from __future__ import annotations

from collections.abc import Callable

from peers.network.ports import HeartbeatLoad
from peers.worker.order_enforcement import OrderEnforcer
from peers.worker.worker_context import WorkerContext
from protocols.messages.table import (
    AUDIT_MESSAGES,
    DATA_MESSAGES,
    STATE_MESSAGES,
    ForwardRequest,
    GetState,
    Message,
    OrderUpdate,
    ReceiptMessage,
    Slices,
    Statements,
)
from swarmnet.identifiers import PeerId
from swarmnet.rounds.events import ProcessSuspended


class MessageDispatcher:
    """`Listener` of the peer links. It calls `wake()` so that waiting parts of the worker check their
    condition."""

    def __init__(self, worker: WorkerContext, orders: OrderEnforcer, wake: Callable[[], None]) -> None:
        self.worker = worker
        self.orders = orders
        self.wake = wake

    def load(self) -> HeartbeatLoad:
        return self.worker.load()

    def linked(self, peer: PeerId, stage: int) -> None:
        worker = self.worker
        self.wake()
        self.orders.linked(peer)
        worker.receipts.linked(peer)
        if worker.update is not None and stage == worker.stage:
            worker.update.linked(peer)

    def counted(self, peers: int) -> None:
        if self.worker.update is not None:
            self.worker.update.counted(peers)

    def on_stall(self, seconds: float) -> None:
        if self.worker.update is not None:
            self.worker.update.feed(ProcessSuspended(seconds))

    def unlinked(self, peer: PeerId, reason: str, released: bool) -> None:
        worker = self.worker
        self.wake()
        if worker.data is not None:
            worker.data.unlinked(peer)
        if worker.update is not None:
            worker.update.left(peer, released)
        if worker.states is not None:
            worker.states.unlinked(peer)
        worker.moving.gone(peer)

    def beat(self, peer: PeerId) -> None:
        worker = self.worker
        worker.moving.beaten(peer)
        if worker.data is not None:
            worker.data.pump()

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Pass a message to the part of the worker that handles its kind. A message whose part does not exist
        yet is dropped."""
        worker = self.worker
        self.wake()
        if isinstance(message, DATA_MESSAGES):
            if worker.data is not None:
                worker.data.message(peer, message, body)
        elif isinstance(message, STATE_MESSAGES):
            if isinstance(message, GetState):
                worker.digests.send_all(peer)
                self.orders.on_state_request(peer)
            if worker.states is not None:
                worker.states.message(peer, message, body)
        elif isinstance(message, Statements):
            if worker.recovery.keepers.is_one(peer):
                worker.recovery.keepers.receive(peer, message)
            else:
                worker.digests.message(peer, message)
        elif isinstance(message, OrderUpdate):
            self.orders.message(peer, message)
        elif isinstance(message, ReceiptMessage):
            worker.receipts.message(peer, message)
        elif isinstance(message, ForwardRequest):
            worker.inference.message(peer, message, body)
        elif worker.update is not None and (
            peer in worker.update.rounds.neighbours or isinstance(message, (Slices, *AUDIT_MESSAGES))
        ):
            worker.update.message(peer, message, body)
