"""What a worker's neighbourhood tells it, handed to the part of the worker that it concerns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peers.listener import Load
from protocols.messages import (
    DATA_MESSAGES,
    STATE_MESSAGES,
    AskForward,
    AskState,
    Message,
    OrderIs,
    ReceiptIs,
    Statements,
)
from swarmnet.identifiers import PeerId

if TYPE_CHECKING:
    from peers.worker import Worker


class Hearing:
    """`Listener` of the neighbourhood. Each of these wakes whatever in the worker waits for a condition."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def load(self) -> Load:
        return load_of(self.worker)

    def linked(self, peer: PeerId, stage: int) -> None:
        worker = self.worker
        worker.wake()
        worker.orders.linked(peer)
        worker.receipts.linked(peer)
        if worker.update is not None and stage == worker.stage:
            worker.update.joined(peer)

    def counted(self, peers: int) -> None:
        if self.worker.update is not None:
            self.worker.update.counted(peers)

    def unlinked(self, peer: PeerId, reason: str, released: bool) -> None:
        worker = self.worker
        worker.wake()
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
        worker = self.worker
        worker.wake()
        if isinstance(message, DATA_MESSAGES):
            if worker.data is not None:
                worker.data.message(peer, message, body)
        elif isinstance(message, STATE_MESSAGES):
            if isinstance(message, AskState):
                worker.digests.tell(peer)
                worker.orders.asked(peer)
            if worker.states is not None:
                worker.states.message(peer, message, body)
        elif isinstance(message, Statements):
            if worker.recovery.keepers.is_one(peer):
                worker.recovery.keepers.hear(peer, message)
            else:
                worker.digests.message(peer, message)
        elif isinstance(message, OrderIs):
            worker.orders.message(peer, message)
        elif isinstance(message, ReceiptIs):
            worker.receipts.message(peer, message)
        elif isinstance(message, AskForward):
            worker.inference.message(peer, message, body)
        elif worker.update is not None and peer in worker.update.rounds.neighbours:
            worker.update.message(peer, message, body)


def load_of(worker: Worker) -> Load:
    """What beats say of a worker."""
    data, update = worker.data, worker.update
    if data is None or update is None:
        return Load(worker.stage, False, 0, 0.0, 0)
    ready = data.serving and update.rounds.in_step
    free = max(0, data.pipeline.slots - data.pipeline.under_way)
    round, moving_to = update.rounds.current, worker.moving.moving_to
    return Load(worker.stage, ready, free, data.service_seconds, round, moving_to)
