"""Dispatch what the peer links report (messages, new and lost links) to the part of the worker concerned."""

from __future__ import annotations

from collections.abc import Callable, Collection

from peers.network.message_router import MessageRouter, handles
from peers.network.ports import HeartbeatLoad
from peers.state.snapshot_service import SnapshotService
from peers.worker.inference.server import Inference
from peers.worker.order_enforcement import OrderEnforcer
from peers.worker.pipeline.pipeline_service import PipelineService
from peers.worker.pipeline.reservation_client import ReservationClient
from peers.worker.rounds.audit_path import AuditPath
from peers.worker.rounds.receipt_service import Receipts
from peers.worker.rounds.reducer_path import ReducerPath
from peers.worker.rounds.round_service import RoundService
from peers.worker.worker_context import WorkerContext
from protocols.fields import Body
from protocols.messages.table import GetState, Message, Statements
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.rounds.events import ProcessSuspended

SERVICES = (
    PipelineService,
    ReservationClient,
    RoundService,
    ReducerPath,
    AuditPath,
    SnapshotService,
    Receipts,
    Inference,
    OrderEnforcer,
)
"""The parts of a worker that handle messages."""


class MessageDispatcher:
    """`Listener` of the peer links. It calls `wake()` so that waiting parts of the worker check their
    condition."""

    def __init__(
        self,
        *,
        worker: WorkerContext,
        orders: OrderEnforcer,
        wake: Callable[[], None],
        see_own: Callable[[SignedRecord], None],
    ) -> None:
        """`see_own` is called with each record that this peer's own key has signed."""
        self.worker = worker
        self.orders = orders
        self.wake = wake
        self.see_own = see_own
        self.router = MessageRouter(*SERVICES)

    def begin(self) -> None:
        """Pass messages to all parts that exist once the stage is known. Those to a part that does not exist
        yet are dropped."""
        worker = self.worker
        assert worker.data is not None
        for part in (self, self.orders, worker.states, worker.receipts, worker.inference):
            self.router.add(part)
        worker.data.register(self.router)

    def met(self) -> Collection[PeerId]:
        return self.worker.presence.directory.met()

    def own_record(self, signed: SignedRecord) -> None:
        self.see_own(signed)

    def answer_visitor(self, peer: PeerId, message: Message, body: Body) -> None:
        self.worker.inference.visitors.post(peer, message, body)

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
        self.wake()
        self.router.dispatch(peer, message, body)

    @handles(GetState)
    def _on_state_request(self, peer: PeerId, _message: GetState, _body: bytes) -> None:
        """Send what proves the offers that `SnapshotService` sends next."""
        self.worker.digests.send_all(peer)
        self.orders.on_state_request(peer)

    @handles(Statements)
    def _statements(self, peer: PeerId, message: Statements, _body: bytes) -> None:
        keepers = self.worker.recovery.keepers
        if keepers.is_one(peer):
            keepers.receive(peer, message)
        else:
            self.worker.digests.message(peer, message)
